"""One attention problem: its name, its tensors, its floating-point operations and bytes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.counts import attention_bytes, attention_flops, visible_pairs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DROPOUT_STATE = (0x5EED, 7)


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of attention.

    direction: "forward", "backward" (of a forward pass that ran before) or "training" (both).
    window: how many keys a query sees, its own included; the call is then causal.
    mask: "random bool" (a tenth hidden, in every tile), "document bool" (blocks on the diagonal),
        "float" (a bias for each head and pair, with a gradient), or "".
    key_lengths: the keys in use of each batch entry.
    lengths: the sequences of a packed call; then batch is 1 and len_q, len_k are their sum.
    """

    suite: str
    direction: str
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    op: str = "flash_attention"
    causal: bool = False
    window: int = 0
    mask: str = ""
    dropout_p: float = 0.0
    key_lengths: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def options(self) -> str:
        """What the call does beyond plain attention, in words; "full" if nothing."""
        words = [
            "packed" if self.lengths else "",
            f"window {self.window}" if self.window else "causal" if self.causal else "",
            f"{self.mask} mask" if self.mask else "",
            "key lengths" if self.key_lengths else "",
            f"dropout {self.dropout_p:g}" if self.dropout_p else "",
        ]
        return " ".join(word for word in words if word) or "full"

    @property
    def shape(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else self._grouped
        rows = f"{len(self.lengths)} in {self.len_q}" if self.lengths else f"{self.len_q}"
        rows = rows if self.len_q == self.len_k else f"{self.len_q}:{self.len_k}"
        return f"{self.batch} x {heads} x {rows} x {self.head_dim}"

    @property
    def _grouped(self) -> str:
        return f"{self.heads_q}/{self.heads_kv}"

    @property
    def label(self) -> str:
        return f"{self.direction:8} {self.dtype} {self.shape:<24} {self.options}"

    @property
    def trains(self) -> bool:
        return self.direction != "forward"

    def columns(self) -> dict:
        names = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim")
        return {"shape": self.shape, "options": self.options} | {
            name: getattr(self, name) for name in names
        }

    def counts(self, tensors: Tensors) -> tuple[float, float]:
        """(floating-point operations of the visible pairs, bytes that must move)."""
        pairs = visible_pairs(self, tensors.mask)
        return attention_flops(self, pairs), attention_bytes(self)


class Tensors(NamedTuple):
    """Dense: (batch, heads, length, head_dim); packed: (total, heads, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor  # like query
    mask: Tensor | None  # (1, heads_q or 1, len_q, len_k)
    key_lengths: Tensor | None  # int32 (batch)
    cu_seqlens: Tensor | None  # int32 (sequences + 1)
    rng_state: Tensor | None  # int64 (2)

    def inputs(self) -> dict[str, Tensor]:
        """Those with a gradient."""
        named = {name: getattr(self, name) for name in ("query", "key", "value", "mask")}
        return {k: t for k, t in named.items() if t is not None and t.requires_grad}


def make_tensors(case: Attention, device: str) -> Tensors:
    """Random normal data, the same for a case on every run."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[case.dtype]

    def random(heads: int, length: int) -> Tensor:
        packed = (length, heads, case.head_dim)
        shape = packed if case.lengths else (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    query = random(case.heads_q, case.len_q)
    key, value = (random(case.heads_kv, case.len_k) for _ in range(2))
    grad_out = random(case.heads_q, case.len_q) if case.trains else query
    mask = make_mask(case, device, generator)
    if case.trains:
        for tensor in (query, key, value, mask):
            if tensor is not None and tensor.is_floating_point():
                tensor.requires_grad_()

    def integers(values, dtype=torch.int32) -> Tensor | None:
        return torch.tensor(values, dtype=dtype, device=device) if values else None

    offsets = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    state = integers(DROPOUT_STATE, torch.int64) if case.dropout_p else None
    cu_seqlens = integers(offsets) if case.lengths else None
    lengths = integers(case.key_lengths)
    return Tensors(query, key, value, grad_out, mask, lengths, cu_seqlens, state)


def make_mask(case: Attention, device: str, generator: torch.Generator) -> Tensor | None:
    pairs = (case.len_q, case.len_k)
    if case.mask == "random bool":
        return torch.rand(1, 1, *pairs, device=device, generator=generator) < 0.9
    if case.mask == "document bool":
        # Eight documents of equal length.
        row, col = (torch.arange(length, device=device) * 8 // length for length in pairs)
        return (row[:, None] == col).view(1, 1, *pairs)
    if case.mask == "float":
        shape = (1, case.heads_q, *pairs)
        return torch.randn(shape, device=device, dtype=DTYPES[case.dtype], generator=generator)
    return None
