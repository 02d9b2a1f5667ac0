"""Arguments of the attention functions: what Python completes, and what fake kernels check.

The C++ ops check everything once more, values included; the rules here are the cheap half of
theirs, for tensors that have a shape but no data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext._registration import error

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 512  # kMaxHeadDim of csrc/core/constants.h

# Options that shape the scores, in the order of SCORE_OPTIONS of csrc/ops/schema.cpp.
SCORE_OPTIONS = (
    "alibi_slopes", "sinks", "rng_state", "dropout_p", "causal", "window_left", "window_right",
    "alignment", "scale", "softcap",
)  # fmt: skip
DENSE_OPTIONS = ("attn_mask", "key_lengths", *SCORE_OPTIONS)
PACKED_OPTIONS = ("seqused_q", "seqused_k", *SCORE_OPTIONS)


def window_sides(window) -> tuple[int | None, int | None]:
    """The two sides of a window argument: None or a pair of None or a number of keys."""
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise error("window", "None or a pair (left, right)", repr(window), TypeError) from None
    for name, side in (("window[0]", left), ("window[1]", right)):
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise error(name, "None (unlimited) or an int", repr(side), TypeError)
        if side < 0:
            raise error(name, "None (unlimited) or a number of keys from 0", side)
    return left, right


def check_flag(name: str, value) -> None:
    """The dispatcher would take any object for its truth."""
    if value is not True and value is not False:
        raise error(name, "a bool", repr(value), TypeError)


def state_for_dropout(dropout_p: float, rng_state: Tensor | None, query: Tensor) -> Tensor | None:
    """The caller's rng_state, or one drawn for this call. Nothing is drawn for an invalid rate."""
    if not hasattr(dropout_p, "__float__"):
        raise error("dropout_p", "a number", repr(dropout_p), TypeError)
    if not 0 <= dropout_p <= 1:
        raise error("dropout_p", "a probability from 0 to 1", dropout_p)
    if rng_state is None:
        from flashattn_ext.random import reserve_rng

        rng_state = reserve_rng(query.device)
    return rng_state


def options_of(names: tuple[str, ...], values) -> dict:
    """The options of a raw op as those of :mod:`flashattn_ext.reference`."""
    options = dict(zip(names, values, strict=True))
    options["window"] = (options.pop("window_left"), options.pop("window_right"))
    return options


def cast_inputs(names: tuple[str, ...]):
    """Autocast: query, key, value and a 16-bit attn_mask go to the autocast dtype; fp64 stays.

    An fp32 mask is kept: it may be added to the scores of any dtype, and loses nothing.
    """

    def cast(dtype, args, kwargs):
        def cast_one(name, value):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if value.dtype == torch.float64:
                return value
            if name == "attn_mask" and value.dtype == torch.float32:
                return value
            return value.to(dtype) if name in ("query", "key", "value", "attn_mask") else value

        return tuple(map(cast_one, names, args)), kwargs

    return cast


def check_dense(query: Tensor, key: Tensor, value: Tensor, options: dict) -> None:
    attn_mask = options.get("attn_mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _require(tensor.dim() == 4, name, "4 dimensions (batch, heads, length, head_dim)", tensor)
    for name, tensor in (("key", key), ("value", value)):
        _require(tensor.size(0) == query.size(0), name, "the batch of query", tensor)
    _check_inputs(query, key, value, length_dimension=2)
    _check_devices(query, options)
    if attn_mask is None:
        return
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise error(
            "attn_mask", f"dtype bool, float32 or {query.dtype}", attn_mask.dtype, RuntimeError
        )
    full = (*query.shape[:3], key.size(2))
    expected = f"a shape that broadcasts to (batch, heads_q, len_q, len_k) = {tuple(full)}"
    _require(attn_mask.dim() <= 4, "attn_mask", expected, attn_mask)
    for own, size in zip(reversed(attn_mask.shape), reversed(full), strict=False):
        _require(_either(own == 1, own == size), "attn_mask", expected, attn_mask)


def check_packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, options
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _require(tensor.dim() == 3, name, "3 dimensions (total, heads, head_dim)", tensor)
    _require(cu_seqlens_q.dim() == 1, "cu_seqlens_q", "shape (sequences + 1,)", cu_seqlens_q)
    _check_inputs(query, key, value, length_dimension=0)
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_devices(query, {**offsets, **options})


def _check_inputs(query: Tensor, key: Tensor, value: Tensor, length_dimension: int) -> None:
    if query.dtype not in FLOATING:
        raise error(
            "query", "dtype float16, bfloat16, float32 or float64", query.dtype, RuntimeError
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise error(name, f"dtype {query.dtype}", tensor.dtype, RuntimeError)
    _check_devices(query, {"key": key, "value": value})
    heads_q, heads_kv = query.size(1), key.size(1)
    _require(key.size(-1) == query.size(-1), "key", "head_dim as in query", key)
    _require(value.size(1) == heads_kv, "value", "heads as in key", value)
    same_length = value.size(length_dimension) == key.size(length_dimension)
    _require(same_length, "value", "length as in key", value)
    groups = heads_q == 0 if heads_kv == 0 else heads_q % heads_kv == 0
    _require(groups, "query", "heads_q to be a multiple of heads_kv", query)
    for name, tensor in (("query", query), ("value", value)):
        _require(tensor.size(-1) <= MAX_HEAD_DIM, name, f"head_dim up to {MAX_HEAD_DIM}", tensor)


def _check_devices(query: Tensor, named: dict) -> None:
    for name, value in named.items():
        if isinstance(value, Tensor) and value.device != query.device:
            raise error(name, f"the device of query, {query.device}", value.device, RuntimeError)


def _either(a, b):
    """`a or b`, without asking a size that is known at run time only."""
    if isinstance(a, bool):
        return a or b
    from torch.fx.experimental.symbolic_shapes import sym_or

    return sym_or(a, b)


def _require(condition, argument: str, expected: str, tensor: Tensor) -> None:
    """A check that holds for symbolic sizes too, and becomes a guard there."""
    torch._check(condition, lambda: str(error(argument, expected, tuple(tensor.shape))))
