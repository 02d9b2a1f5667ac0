"""Joining attention over two sets of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashattn_ext._registration import define_public, error


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of a and b together, from the results over each alone.

    Args:
        out_a, out_b: (batch, heads, length, head_dim), or packed (total, heads, head_dim).
        lse_a, lse_b: the log-sum-exp of each row: (batch, heads, length), or packed (heads, total).

    Returns:
        (out, lse) of the shapes and dtypes of out_a and lse_a. A state with lse -inf is empty and
        changes nothing, whatever its `out` holds; two empty states give out 0 and lse -inf.

    Raises:
        ValueError: shapes that do not fit together.

    Gradients: of all four, to any order. Nothing overflows for any two finite lse. The rule of
    partial softmaxes: Milakov and Gimelshein, arXiv:1805.02867.
    """
    _check_shapes(out_a, lse_a, out_b, lse_b)
    larger = torch.maximum(lse_a, lse_b).detach()
    larger = torch.where(larger == -math.inf, 0, larger)
    part_a, part_b = torch.exp(lse_a - larger), torch.exp(lse_b - larger)
    total = part_a + part_b
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -math.inf, larger + torch.log(total))
    out = _weighted(part_a / total, out_a) + _weighted(part_b / total, out_b)
    return out.to(out_a.dtype), lse


def _weighted(weight: Tensor, out: Tensor) -> Tensor:
    """weight * out in the dtype of weight, 0 where the weight is."""
    weight = (weight if out.dim() == 4 else weight.transpose(0, 1)).unsqueeze(-1)
    return weight * torch.where(weight == 0, 0, out)


def _check_shapes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if out_a.dim() not in (3, 4):
        raise error("out_a", "3 (packed) or 4 dimensions", tuple(out_a.shape))
    rows = out_a.shape[:3] if out_a.dim() == 4 else (out_a.size(1), out_a.size(0))
    for name, tensor, shape in (
        ("out_b", out_b, out_a.shape),
        ("lse_a", lse_a, rows),
        ("lse_b", lse_b, rows),
    ):
        if tuple(tensor.shape) != tuple(shape):
            raise error(name, f"shape {tuple(shape)}", tuple(tensor.shape))


define_public(
    "merge_states",
    merge_states,
    "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b",
    "(Tensor, Tensor)",
)
