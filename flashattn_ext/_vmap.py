"""Rules for torch.func.vmap: fold the mapped dimension into the batch, or loop over its entries."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext._registration import (
    argument_names,
    library,
    positional_defaults,
)

# Arguments whose first dimension is the batch.
WITH_BATCH = (
    "query", "key", "value", "key_lengths", "grad_out", "grad_lse", "grad_weights", "out", "lse",
    "out_low", "lse_low", "probs",
)  # fmt: skip


def register_vmap(op: torch._ops.OpOverload, rule) -> None:
    """`rule(size, dims, args, kwargs)` gives (results, their mapped dims)."""
    defaults = positional_defaults(op)

    def kernel(info, in_dims, *args, **kwargs):
        args = (*args, *defaults[len(args) :])
        dims = (*in_dims, *[None] * (len(args) - len(in_dims)))
        return rule(info.batch_size, dims, args, kwargs)

    torch.library.register_vmap(op.name(), kernel, lib=library)


def loop_over(op: torch._ops.OpOverload):
    """The rule that calls the op once for each entry and stacks the results."""

    def rule(size, dims, args, kwargs):
        if size == 0:
            raise ValueError(f"flashattn_ext: vmap of {op.name()} over 0 entries is not supported")
        results = [op(*_entry(i, dims, args), **kwargs) for i in range(size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return rule


def fold_into_batch(op: torch._ops.OpOverload):
    """The rule for dense attention ops: one call with a batch of size * batch, where that is right.

    Dropout counts batch entries, and the gradients of masks, slopes and sinks are summed over the
    batch, so these need a call for each entry; so does a mask that folding would have to copy.
    """
    names = argument_names(op)
    loop = loop_over(op)

    def rule(size, dims, args, kwargs):
        named = dict(zip(names, args, strict=True))
        dim_of = dict(zip(names, dims, strict=True))
        query = named["query"]
        batch = query.size(0 if dim_of["query"] is None else _logical_dim(0, dim_of["query"]))
        per_entry = (
            named["dropout_p"] > 0
            or dim_of["alibi_slopes"] is not None
            or dim_of["sinks"] is not None
            or any(named.get("wanted", ())[3:])
        )
        if per_entry:
            return loop(size, dims, args, kwargs)
        for name, value in named.items():
            slopes_with_batch = name == "alibi_slopes" and value is not None and value.dim() == 2
            if value is not None and (name in WITH_BATCH or slopes_with_batch):
                named[name] = _with_leading(size, dim_of[name], value).flatten(0, 1)
        try:
            named["attn_mask"] = _fold_mask(size, batch, dim_of["attn_mask"], named["attn_mask"])
        except RuntimeError:  # no view of the mask has that shape
            return loop(size, dims, args, kwargs)
        results = op(*named.values(), **kwargs)
        absent = [result.dim() == 1 for result in results]
        results = tuple(
            result if skip else result.unflatten(0, (size, batch))
            for result, skip in zip(results, absent, strict=True)
        )
        return results, tuple(None if skip else 0 for skip in absent)

    return rule


def _entry(i: int, dims, args) -> list:
    return [
        arg.select(dim, i) if isinstance(arg, Tensor) and dim is not None else arg
        for arg, dim in zip(args, dims, strict=True)
    ]


def _logical_dim(dim: int, mapped: int) -> int:
    return dim if dim < mapped else dim + 1


def _with_leading(size: int, dim: int | None, tensor: Tensor) -> Tensor:
    """The tensor with the mapped dimension first."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _fold_mask(size: int, batch: int, dim: int | None, mask: Tensor | None) -> Tensor | None:
    if mask is None or (dim is None and (mask.dim() < 4 or mask.size(0) == 1)):
        return mask
    mask = _with_leading(size, dim, mask)  # (size, ...)
    ones = (1,) * (5 - mask.dim())
    mask = mask.view(size, *ones, *mask.shape[1:])
    mask = mask.expand(size, batch, *mask.shape[2:])
    return mask.view(size * batch, *mask.shape[2:])
