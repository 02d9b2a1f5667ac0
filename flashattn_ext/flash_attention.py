"""Exact attention in linear memory, dense and packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashattn_ext import reference
from flashattn_ext._arguments import (
    DENSE_OPTIONS,
    PACKED_OPTIONS,
    cast_inputs,
    check_dense,
    check_flag,
    check_packed,
    options_of,
    state_for_dropout,
    window_sides,
)
from flashattn_ext._autograd import (
    DifferentiableOp,
    Function,
    call_below_autograd,
    differentiate_by_formula,
)
from flashattn_ext._gradients import fake_gradients, wanted_gradients
from flashattn_ext._registration import (
    argument_names,
    define_public_with_results,
    error,
    raw_op,
    register_autocast,
    register_fake,
)
from flashattn_ext._vmap import fold_into_batch, loop_over, register_vmap
from flashattn_ext.layout import absent, empty_in_order_of


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale * query @ key^T) @ value, without ever storing the scores.

    Args:
        query: (batch, heads_q, len_q, head_dim) in fp16, bf16, fp32 or fp64, with any strides.
        key: (batch, heads_kv, len_k, head_dim), dtype of query. heads_q is a multiple of heads_kv;
            query head h reads key/value head `h // (heads_q // heads_kv)`.
        value: (batch, heads_kv, len_k, head_dim_v), dtype of query. Head dims are at most 512.
        attn_mask: bool (True = attend), or float in the dtype of query or fp32, added to the
            scores; any shape that broadcasts to (batch, heads_q, len_q, len_k). It is never copied.
        causal: hides the keys right of the diagonal.
        window: (left, right), the number of keys to see on both sides of the diagonal, inclusive;
            None on a side: no limit there.
        alignment: where the diagonal ends: "top_left" (query 0 is level with key 0) or
            "bottom_right" (the last query is level with the last key). Needed when causal, window
            or alibi_slopes is used and len_q may differ from len_k.
        key_lengths: int32 or int64 (batch): keys in use. What lies behind them is never read.
        dropout_p: share of the probabilities to drop, in [0, 1]. There is no training flag.
        scale: default 1 / sqrt(head_dim).
        softcap: c > 0 turns a score s into c * tanh(s / c), before mask and ALiBi are added.
        alibi_slopes: fp32 (heads_q) or (batch, heads_q): -slope * distance from the diagonal is
            added.
        sinks: floating (heads_q): a logit that takes its share of every row's softmax and attends
            to nothing.
        deterministic: bitwise reproducible gradients (results always are, and on the CPU gradients
            too). On CUDA backward adds up the gradient of query, and that of a mask broadcast over
            batch or heads, in any order, unless this is True: then blocks take turns, which takes
            longer but no more memory. None: as `torch.are_deterministic_algorithms_enabled()` says
            when backward runs.
        rng_state: int64 (2), the dropout state (:func:`flashattn_ext.reserve_rng`); None: drawn
            here.
        return_lse: also return the natural logarithm of each row's sum of exp(score), sinks
            included: (batch, heads_q, len_q), fp32 (fp64 for fp64).
        return_max_logits: also return the largest visible score of each head: (batch, heads_q),
            fp32, without a gradient.

    Returns:
        out (batch, heads_q, len_q, head_dim_v), in dtype and memory order of query; or a tuple
        (out, lse, max_logits) of out and what else was asked for. A row that sees no key is 0, with
        lse -inf and zero gradients.

    Raises:
        RuntimeError, ValueError, TypeError: naming the argument, what was expected and what came.

    Gradients: of query, key, value, float attn_mask, alibi_slopes and sinks, through out and lse;
    only those asked for are computed, accumulated in fp32. Second derivatives and forward mode go
    through the unfused formula (:mod:`flashattn_ext.reference`), in quadratic memory.

    Method: Dao et al., arXiv:2205.14135 and arXiv:2307.08691.
    """
    window_left, window_right = window_sides(window)
    check_flag("causal", causal)
    if dropout_p != 0:
        rng_state = state_for_dropout(dropout_p, rng_state, query)
    out, lse, max_logits, *_ = _dense(
        query, key, value, attn_mask, key_lengths, alibi_slopes, sinks, rng_state, dropout_p,
        causal, window_left, window_right, alignment, scale, softcap, deterministic,
        return_max_logits, False,
    )  # fmt: skip
    return _results(out, lse, max_logits, return_lse, return_max_logits)


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    rng_state: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention within each sequence of a packed batch; see :func:`flash_attention`.

    Args:
        query: (total_q, heads_q, head_dim): the rows of all sequences, one after the other.
        key, value: (total_k, heads_kv, head_dim), (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (sequences + 1), on the inputs' device: sequence
            s has the rows from cu_seqlens[s] to cu_seqlens[s + 1]. On the CPU offsets that decrease
            or pass the end are an error; on CUDA they are clamped.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        seqused_q, seqused_k: int32 or int64 (sequences): how many rows of each sequence are in use.
        alignment: default "bottom_right".
        alibi_slopes: fp32 (heads_q) or (sequences, heads_q).
        The other options are those of :func:`flash_attention`.

    Returns:
        out (total_q, heads_q, head_dim_v); lse (heads_q, total_q); max_logits (sequences, heads_q).
        Rows that belong to no sequence, or are not in use, are 0 with lse -inf.

    Dropout counts the sequence's index and positions inside it: a packed call drops what the padded
    call drops.
    """
    window_left, window_right = window_sides(window)
    check_flag("causal", causal)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(longest, Tensor):
            raise error(name, "an int (use .item())", "a Tensor", TypeError)
    if dropout_p != 0:
        rng_state = state_for_dropout(dropout_p, rng_state, query)
    out, lse, max_logits, *_ = _packed(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        seqused_q, seqused_k, alibi_slopes, sinks, rng_state, dropout_p,
        causal, window_left, window_right, alignment, scale, softcap, deterministic,
        return_max_logits, False,
    )  # fmt: skip
    return _results(out, lse, max_logits, return_lse, return_max_logits)


def _results(out, lse, max_logits, return_lse: bool, return_max_logits: bool):
    if not (return_lse or return_max_logits):
        return out
    return (out, *((lse,) if return_lse else ()), *((max_logits,) if return_max_logits else ()))


def _register(
    name: str,
    inputs: int,
    tensors: tuple[str, ...],
    differentiable: tuple[str, ...],
    forward_formula: Callable,
    backward_formula: Callable,
) -> DifferentiableOp:
    """Gives `<name>_forward` and `<name>_backward` their gradients.

    inputs: how many leading arguments are no options (they come before out and lse in backward).
    tensors: the arguments that may be tensors; differentiable: those with a gradient, in the order
    of backward's results.
    """
    forward_op, backward_op = raw_op(f"{name}_forward"), raw_op(f"{name}_backward")
    names = argument_names(forward_op)
    tensor_at = [names.index(tensor) for tensor in tensors]
    other_at = [i for i in range(len(names)) if i not in tensor_at]
    gradient_at = [names.index(tensor) for tensor in differentiable]
    backward = differentiate_by_formula(backward_op, backward_formula)

    class FlashAttention(Function):
        @staticmethod
        def forward(ctx, *args):
            results = call_below_autograd(forward_op, *args[:-1], True)
            out, lse, max_logits, *lows = results
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*[args[i] for i in tensor_at], out, lse, *lows)
            ctx.others = [args[i] for i in other_at]
            if not args[-1]:
                results = out, lse, max_logits
            ctx.mark_non_differentiable(*results[2:])
            return results

        @staticmethod
        def backward(ctx, grad_out, grad_lse, *_):
            *saved, out, lse, out_low, lse_low = ctx.saved_tensors
            args: list = [None] * len(names)
            for i, value in zip((*tensor_at, *other_at), (*saved, *ctx.others), strict=True):
                args[i] = value
            if grad_out is None:
                grad_out = torch.zeros_like(out)
            deterministic = args[-3]
            if deterministic is None:
                deterministic = torch.are_deterministic_algorithms_enabled()
            needed = ctx.needs_input_grad
            wanted = [needed[i] for i in gradient_at]
            gradients = backward(
                grad_out, grad_lse, *args[:inputs], out, lse, out_low, lse_low, wanted,
                *args[inputs:-3], deterministic,
            )  # fmt: skip
            answer: list[Tensor | None] = [None] * len(names)
            for i, asked, gradient in zip(gradient_at, wanted, gradients, strict=True):
                answer[i] = gradient if asked else None
            return tuple(answer)

    return _FlashOp(forward_op, FlashAttention, forward_formula)


class _FlashOp(DifferentiableOp):
    """Called from here with gradients, it leaves out the low parts, which only backward needs."""

    def autograd_kernel(self, *args, **kwargs):
        out, lse, max_logits, *lows = self.run(args, kwargs)
        return out, lse, max_logits, *(lows or (absent(out), absent(lse)))


def _forward_results(result: reference.Attention, return_max_logits: bool, return_low: bool):
    out, lse, max_logits = result.out, result.lse, result.max_logits
    if not return_max_logits:
        max_logits = absent(max_logits)
    out_low = torch.zeros_like(out) if return_low and out.dtype != lse.dtype else absent(out)
    return out, lse, max_logits, out_low, torch.zeros_like(lse) if return_low else absent(lse)


def _dense_formula(query, key, value, *rest):
    *options, _deterministic, return_max_logits, return_low = rest
    result = reference.attention(query, key, value, **options_of(DENSE_OPTIONS, options))
    return _forward_results(result, return_max_logits, return_low)


def _dense_backward_formula(
    grad_out, grad_lse, query, key, value, _out, _lse, _out_low, _lse_low, wanted, *options
):
    named = options_of(DENSE_OPTIONS, options[:-1])
    gradients = reference.attention_backward(grad_out, grad_lse, query, key, value, **named)
    rest = (named["attn_mask"], named["alibi_slopes"], named["sinks"])
    return wanted_gradients(gradients, (query, key, value, *rest), wanted)


def _packed_formula(*args):
    *arguments, _deterministic, return_max_logits, return_low = args
    options = options_of(PACKED_OPTIONS, arguments[7:])
    result = reference.attention_varlen(*arguments[:7], **options)
    return _forward_results(result, return_max_logits, return_low)


def _packed_backward_formula(grad_out, grad_lse, *args):
    inputs, wanted, options = args[:7], args[11], options_of(PACKED_OPTIONS, args[12:-1])
    gradients = reference.attention_varlen_backward(grad_out, grad_lse, *inputs, **options)
    tensors = (*inputs[:3], options["alibi_slopes"], options["sinks"])
    without_mask = (*gradients[:3], *gradients[4:])
    return wanted_gradients(without_mask, tensors, wanted)


def _fake_results(query, value, lse_shape, max_logits_shape, return_max_logits, return_low):
    real = reference.accumulation_dtype(query.dtype)
    lse = query.new_empty(lse_shape, dtype=real)
    max_logits_shape = max_logits_shape if return_max_logits else (0,)
    max_logits = query.new_empty(max_logits_shape, dtype=torch.float32)
    out = empty_in_order_of(query, (*query.shape[:-1], value.size(-1)))
    out_low = torch.empty_like(out) if return_low and query.dtype != real else absent(out)
    return out, lse, max_logits, out_low, torch.empty_like(lse) if return_low else absent(lse)


def _fake_dense(query, key, value, *rest):
    rest = (*rest, *_dense.defaults[3 + len(rest) :])
    check_dense(query, key, value, dict(zip(DENSE_OPTIONS, rest, strict=False)))
    return _fake_results(query, value, query.shape[:3], query.shape[:2], *rest[-2:])


def _fake_dense_backward(
    grad_out, grad_lse, query, key, value, out, lse, out_low, lse_low, wanted, *rest
):
    named = dict(zip(DENSE_OPTIONS, rest, strict=False))
    options = [named.get(name) for name in ("attn_mask", "alibi_slopes", "sinks")]
    return fake_gradients((query, key, value, *options), wanted)


def _fake_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, *rest):
    options = dict(zip(PACKED_OPTIONS, rest[2:], strict=False))
    check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, options)
    rest = (*rest, *_packed.defaults[5 + len(rest) :])
    lse_shape = (query.size(1), query.size(0))
    max_logits_shape = (cu_seqlens_q.size(0) - 1, query.size(1))
    return _fake_results(query, value, lse_shape, max_logits_shape, *rest[-2:])


def _fake_packed_backward(grad_out, grad_lse, query, key, value, *rest):
    wanted, named = rest[8], dict(zip(PACKED_OPTIONS, rest[9:], strict=False))
    options = [named.get(name) for name in ("alibi_slopes", "sinks")]
    return fake_gradients((query, key, value, *options), wanted)


_dense = _register(
    "flash_attention",
    inputs=3,
    tensors=("query", "key", "value", *DENSE_OPTIONS[:5]),
    differentiable=("query", "key", "value", "attn_mask", "alibi_slopes", "sinks"),
    forward_formula=_dense_formula,
    backward_formula=_dense_backward_formula,
)
_packed = _register(
    "flash_attention_varlen",
    inputs=7,
    tensors=("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", *PACKED_OPTIONS[:5]),
    differentiable=("query", "key", "value", "alibi_slopes", "sinks"),
    forward_formula=_packed_formula,
    backward_formula=_packed_backward_formula,
)

for _name, _forward_fake, _backward_fake, _batched in (
    ("flash_attention", _fake_dense, _fake_dense_backward, fold_into_batch),
    ("flash_attention_varlen", _fake_packed, _fake_packed_backward, loop_over),
):
    _forward, _backward = raw_op(f"{_name}_forward"), raw_op(f"{_name}_backward")
    register_fake(_forward, _forward_fake)
    register_fake(_backward, _backward_fake)
    register_vmap(_forward, _batched(_forward))
    register_vmap(_backward, _batched(_backward))
    register_autocast(_forward, cast_inputs(tuple(argument_names(_forward))))

_OPTIONS = (
    "bool causal=False, SymInt?[]? window=None, str? alignment=None, {padding}float dropout_p=0.0, "
    "float? scale=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "bool? deterministic=None, Tensor? rng_state=None"
)
define_public_with_results(
    "flash_attention",
    flash_attention,
    "Tensor query, Tensor key, Tensor value, *, Tensor? attn_mask=None, "
    + _OPTIONS.format(padding="Tensor? key_lengths=None, "),
    ("return_lse", "return_max_logits"),
)
define_public_with_results(
    "flash_attention_varlen",
    flash_attention_varlen,
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, *, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    + _OPTIONS.format(padding=""),
    ("return_lse", "return_max_logits"),
)
