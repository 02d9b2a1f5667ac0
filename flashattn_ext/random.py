"""The random bits of dropout: drawn once into a state, then a pure function of it."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext._registration import define_public, library, raw_op, register_fake
from flashattn_ext._vmap import loop_over, register_vmap

_dropout_mask = raw_op("dropout_mask")


def reserve_rng(device: torch.device | str) -> Tensor:
    """Draws a state for dropout from torch's default generator of `device`.

    Returns:
        int64 tensor (2) = [seed, offset] on that device, to be passed as `rng_state` to the
        attention functions. Calls with the same state drop the same pairs.

    Follows `torch.manual_seed`, `torch.random.fork_rng` and checkpointing; in a captured CUDA graph
    every replay draws a new state; under `torch.vmap` it obeys `randomness=`.
    """
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_mask(
    rng_state: Tensor, batch: int, heads_q: int, len_q: int, len_k: int, dropout_p: float
) -> Tensor:
    """The dropout decisions of an attention call with this state, for inspection.

    Args:
        rng_state: int64 (2), from :func:`reserve_rng`.
        batch, heads_q, len_q, len_k: the sizes of the call; `batch` counts sequences.
        dropout_p: the rate, in [0, 1].

    Returns:
        bool (batch, heads_q, len_q, len_k), True where the pair is kept. An entry depends only on
        the state, its indices and `heads_q`: the same on every device and in every kernel. Bits:
        Philox4x32 with 7 rounds (Salmon et al., SC 2011), 16 of them for each pair.

    Raises:
        RuntimeError: a rate outside [0, 1], a negative size, a state of other dtype or shape.
    """
    return _dropout_mask(rng_state, batch, heads_q, len_q, len_k, dropout_p)


def _fake_dropout_mask(rng_state, batch, heads_q, len_q, len_k, dropout_p):
    return rng_state.new_empty((batch, heads_q, len_q, len_k), dtype=torch.bool)


register_fake(_dropout_mask, _fake_dropout_mask)
register_vmap(_dropout_mask, loop_over(_dropout_mask))
define_public(
    "reserve_rng", reserve_rng, "Device device", tags=(torch.Tag.nondeterministic_seeded,)
)
# An op without tensors meets vmap at this key alone.
library.impl("reserve_rng", reserve_rng, "FuncTorchVmapMode")
