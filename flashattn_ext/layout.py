"""How results lie in memory: the rule of csrc/ops/tensors.h, for the fake kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions of `tensor` from the slowest in memory to the fastest.

    Dimensions of size 1 or stride 0 say nothing about order and stay where they are; the others
    share their slots by falling stride.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    sizes, strides = tensor.shape, tensor.stride()
    slots = [
        d
        for d in range(tensor.dim())
        if guard_or_true(sizes[d] > 1) and guard_or_true(strides[d] != 0)
    ]
    order = list(range(tensor.dim()))
    ordered: list[int] = []  # insertion sort: symbolic strides can only be compared
    for d in slots:
        position = len(ordered)
        while position and guard_or_false(strides[ordered[position - 1]] < strides[d]):
            position -= 1
        ordered.insert(position, d)
    for slot, d in zip(slots, ordered, strict=True):
        order[slot] = d
    return order


def empty_in_order_of(like: Tensor, sizes=None, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised dense tensor whose dimensions lie in memory in the order of `like`'s."""
    sizes = like.shape if sizes is None else sizes
    order = memory_order(like)
    position = [order.index(d) for d in range(like.dim())]
    dense = like.new_empty([sizes[d] for d in order], dtype=dtype)
    return dense.permute(position)


def absent(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What an output that nobody asked for looks like."""
    return like.new_empty((0,), dtype=dtype)
