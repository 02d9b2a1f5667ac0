"""The same tensor in every kind of memory: what a caller may hand to an op."""

from __future__ import annotations

import torch

NAN = float("nan")


def _filler(dtype):
    """What lies around a view: reading it must show."""
    return True if dtype == torch.bool else NAN if dtype.is_floating_point else -1


def permuted(tensor, order):
    """Stored with the dimensions in `order`, seen in the usual one."""
    inverse = [order.index(d) for d in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def sliced(tensor):
    """The middle of a larger tensor, in every dimension."""
    storage = tensor.new_full([2 * size + 3 for size in tensor.shape], _filler(tensor.dtype))
    view = storage[tuple(slice(1, 1 + size) for size in tensor.shape)]
    return view.copy_(tensor)


def strided(tensor):
    """Every second element of the last dimension: its stride is 2."""
    storage = tensor.new_full([*tensor.shape[:-1], 2 * tensor.shape[-1]], _filler(tensor.dtype))
    return storage[..., ::2].copy_(tensor)


def offset_by_one(tensor):
    """Contiguous, but starting one element into its storage: aligned to nothing."""
    storage = tensor.new_full([tensor.numel() + 1], _filler(tensor.dtype))
    return storage[1:].view(tensor.shape).copy_(tensor)


def odd_singletons(tensor):
    """Contiguous, with meaningless strides where a dimension has size 1."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    odd = [7 if size == 1 else stride for size, stride in strides]
    return tensor.contiguous().as_strided(tensor.shape, odd)


def expanded(tensor, dim):
    """Stride 0 in one dimension: its first entry stands for all. The values change."""
    return tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand(tensor.shape)


def _orders(tensor):
    d = tensor.dim()
    if d == 4:
        return {
            "blhd": (0, 2, 1, 3),
            "lbhd": (2, 0, 1, 3),
            "bhdl": (0, 1, 3, 2),
            "dlhb": (3, 2, 1, 0),
        }
    return {"blhd": (1, 0, 2), "lbhd": (0, 2, 1), "bhdl": (2, 1, 0), "dlhb": (2, 0, 1)}


ORDERS = ("blhd", "lbhd", "bhdl", "dlhb")
LAYOUTS = ("contiguous", *ORDERS, "sliced", "strided", "offset_by_one", "odd_singletons")
EXPANSIONS = ("expanded_0", "expanded_1", "expanded_2", "expanded_3")


def lay_out(tensor, layout):
    """`tensor` in the named layout, one of LAYOUTS (same values) or EXPANSIONS (other values)."""
    if tensor.dim() < 3 or layout == "contiguous":
        return tensor.contiguous() if layout != "sliced" else sliced(tensor)
    if layout in ORDERS:
        return permuted(tensor, _orders(tensor)[layout])
    if layout in EXPANSIONS:
        dim = int(layout[-1])
        return expanded(tensor, dim) if dim < tensor.dim() else tensor
    functions = {
        "sliced": sliced,
        "strided": strided,
        "offset_by_one": offset_by_one,
        "odd_singletons": odd_singletons,
    }
    return functions[layout](tensor)


def dense_strides_like(tensor, sizes):
    """Strides of a dense tensor of `sizes`, its dimensions in memory in the order of `tensor`'s.

    Dimensions of size 1 or stride 0 stay where they are; the others share slots by falling stride.
    """
    told = [d for d in range(tensor.dim()) if tensor.shape[d] > 1 and tensor.stride(d) != 0]
    order = list(range(tensor.dim()))
    for slot, dim in zip(told, sorted(told, key=lambda d: -tensor.stride(d)), strict=True):
        order[slot] = dim
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)
