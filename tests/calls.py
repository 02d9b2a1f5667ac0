"""Small calls of every public function with every option, for tests of PyTorch's machinery.

A call is a function of its differentiable tensors alone, so that gradcheck, torch.func, compile and
checkpointing can all be pointed at it. Rows of lse that are -inf come out as 0: finite differences
and comparisons need numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import flashattn_ext

RNG_STATE = (123456789012345, 6)


class Call(NamedTuple):
    function: Callable  # of the inputs
    inputs: tuple[torch.Tensor, ...]  # leaves that require grad


def random_tensor(*sizes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)


def attention_inputs(
    dtype=torch.float64, batch=2, heads_q=4, heads_kv=2, len_q=3, len_k=5, head_dim=3, head_dim_v=4
):
    """query, key, value of a dense call."""
    return (
        random_tensor(batch, heads_q, len_q, head_dim, dtype=dtype, seed=1),
        random_tensor(batch, heads_kv, len_k, head_dim, dtype=dtype, seed=2),
        random_tensor(batch, heads_kv, len_k, head_dim_v, dtype=dtype, seed=3),
    )


def _blind_mask():
    mask = random_tensor(2, 1, 3, 5)
    mask[0, 0, 1] = -torch.inf  # a row that sees nothing
    mask[1, 0, 2, :3] = -torch.inf
    return mask


# Options of the dense functions. Floating tensors among them are differentiated too.
DENSE = {
    "plain": {},
    "causal": {"causal": True, "alignment": "bottom_right"},
    "window": {"window": (1, 0), "alignment": "top_left"},
    "half_window": {"window": (None, 1), "alignment": "bottom_right"},
    "key_lengths": {"key_lengths": torch.tensor([0, 4])},
    "bool_mask": {"attn_mask": random_tensor(3, 5) > 0.3},
    "float_mask": {"attn_mask": random_tensor(4, 1, 5)},
    "blind_rows": {"attn_mask": _blind_mask()},
    "scale": {"scale": -0.4},
    "softcap": {"softcap": 1.3},
    "alibi": {"alibi_slopes": random_tensor(2, 4).abs(), "alignment": "bottom_right"},
    "sinks": {"sinks": random_tensor(4)},
    "dropout": {"dropout_p": 0.3, "rng_state": torch.tensor(RNG_STATE)},
    "everything": {
        "attn_mask": _blind_mask(),
        "causal": True,
        "window": (3, 2),
        "alignment": "bottom_right",
        "key_lengths": torch.tensor([2, 5]),
        "dropout_p": 0.2,
        "rng_state": torch.tensor(RNG_STATE),
        "scale": 0.7,
        "softcap": 2.0,
        "alibi_slopes": random_tensor(4).abs(),
        "sinks": random_tensor(4),
    },
}
DENSE_FUNCTIONS = {
    "flash_attention": {"return_lse": True},
    "naive_attention": {"return_lse": True, "return_weights": True},
}
PACKED = {
    "plain": {},
    "used": {"seqused_q": torch.tensor([2, 0, 4]), "seqused_k": torch.tensor([2, 1, 3])},
    "everything": {
        "causal": True,
        "window": (2, None),
        "dropout_p": 0.2,
        "rng_state": torch.tensor(RNG_STATE),
        "softcap": 2.0,
        "alibi_slopes": random_tensor(3, 4).abs(),
        "sinks": random_tensor(4),
        "seqused_k": torch.tensor([2, 3, 1]),
    },
}


def finite(results):
    if isinstance(results, tuple):
        return tuple(map(finite, results))
    return torch.where(torch.isinf(results), 0, results)


def _leaf(tensor, dtype):
    return tensor.detach().to(dtype).clone().requires_grad_()


def _is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def attention_call(function, tensors, options, results, dtype=torch.float64) -> Call:
    """A call of an attention function; slopes stay in a dtype that it takes."""
    names = [name for name, value in options.items() if _is_float(value)]
    real = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [_leaf(tensor, dtype) for tensor in tensors]
    leaves += [_leaf(options[name], real if name == "alibi_slopes" else dtype) for name in names]

    def call(*inputs):
        named = {**options, **dict(zip(names, inputs[len(tensors) :], strict=True)), **results}
        return finite(function(*inputs[: len(tensors)], **named))

    return Call(call, tuple(leaves))


def dense_call(name, option, dtype=torch.float64, results=None, **sizes) -> Call:
    function = getattr(flashattn_ext, name)
    results = DENSE_FUNCTIONS[name] if results is None else results
    return attention_call(function, attention_inputs(dtype, **sizes), DENSE[option], results, dtype)


def packed_call(option, dtype=torch.float64) -> Call:
    tensors = (random_tensor(8, 4, 3), random_tensor(9, 2, 3), random_tensor(9, 2, 4))
    cu_q, cu_k = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 2, 5, 8])

    def function(query, key, value, **options):
        return flashattn_ext.flash_attention_varlen(query, key, value, cu_q, cu_k, 4, 3, **options)

    return attention_call(function, tensors, PACKED[option], {"return_lse": True}, dtype)


def merge_call(dtype=torch.float64) -> Call:
    out_a, out_b = random_tensor(2, 3, 4, 5, seed=1), random_tensor(2, 3, 4, 5, seed=2)
    lse_a, lse_b = random_tensor(2, 3, 4, seed=3), random_tensor(2, 3, 4, seed=4)
    leaves = [_leaf(tensor, dtype) for tensor in (out_a, lse_a, out_b, lse_b)]
    return Call(flashattn_ext.merge_states, tuple(leaves))


def softmax_call(name, dim=1, dtype=torch.float64) -> Call:
    function = getattr(flashattn_ext, name)
    return Call(lambda x: function(x, dim), (_leaf(random_tensor(2, 5, 3), dtype),))


# Every call by name, made anew each time it is asked for.
CALLS: dict[str, Callable[..., Call]] = {
    **{
        f"{name}-{option}": lambda *args, name=name, option=option, **kwargs: dense_call(
            name, option, *args, **kwargs
        )
        for name in DENSE_FUNCTIONS
        for option in DENSE
    },
    **{
        f"flash_attention_varlen-{option}": lambda *args, option=option: packed_call(option, *args)
        for option in PACKED
    },
    "merge_states": merge_call,
    "softmax": lambda *args: softmax_call("softmax", *args),
    "log_softmax": lambda *args: softmax_call("log_softmax", *args),
}
