"""Attention in three materialised steps: scores, softmax, weighted sum."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext import reference
from flashattn_ext._arguments import (
    DENSE_OPTIONS,
    cast_inputs,
    check_dense,
    check_flag,
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
    raw_op,
    register_autocast,
    register_fake,
)
from flashattn_ext._vmap import fold_into_batch, register_vmap
from flashattn_ext.layout import absent, empty_in_order_of


def naive_attention(
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
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The same as :func:`flashattn_ext.flash_attention`, with the weights in memory.

    Memory grows with len_q * len_k. Use it to look at the weights, and to compare.

    Args:
        return_weights: also return the weights, (batch, heads_q, len_q, len_k) in the dtype of
            query, after dropout. A row that sees no key is 0.
        deterministic: accepted for the sake of equal signatures; results and gradients always are.
        The others, shapes, dtypes and errors: as :func:`flashattn_ext.flash_attention`.

    Returns:
        out, or a tuple (out, lse, max_logits, weights) of out and what else was asked for.

    Gradients: through out, lse and weights.
    """
    window_left, window_right = window_sides(window)
    check_flag("causal", causal)
    if dropout_p != 0:
        rng_state = state_for_dropout(dropout_p, rng_state, query)
    out, lse, max_logits, weights, _ = _naive(
        query, key, value, attn_mask, key_lengths, alibi_slopes, sinks, rng_state, dropout_p,
        causal, window_left, window_right, alignment, scale, softcap, return_max_logits,
        return_weights,
    )  # fmt: skip
    if not (return_lse or return_max_logits or return_weights):
        return out
    wanted = ((lse, return_lse), (max_logits, return_max_logits), (weights, return_weights))
    return (out, *(result for result, asked in wanted if asked))


_forward_op, _backward_op = raw_op("naive_attention_forward"), raw_op("naive_attention_backward")
_NAMES = argument_names(_forward_op)
_GRADIENT_AT = [
    _NAMES.index(name) for name in ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")
]
_TENSORS = _NAMES.index("rng_state") + 1  # the arguments before may be tensors, the others not


class NaiveAttention(Function):
    @staticmethod
    def forward(ctx, *args):
        results = call_below_autograd(_forward_op, *args)
        _out, lse, max_logits, _weights, probs = results
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_logits, probs)
        ctx.save_for_backward(*args[:_TENSORS], probs, lse)
        ctx.others = args[_TENSORS:-2]
        return results

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _grad_max_logits, grad_weights, _grad_probs):
        *tensors, probs, lse = ctx.saved_tensors
        query, key, value, *options = (*tensors, *ctx.others)
        if grad_out is None:
            grad_out = query.new_zeros((*query.shape[:-1], value.size(-1)))
        if grad_weights is not None and grad_weights.shape != probs.shape:
            grad_weights = None  # of the absent tensor, when weights were not asked for
        wanted = [ctx.needs_input_grad[i] for i in _GRADIENT_AT]
        gradients = _backward(
            grad_out, grad_lse, grad_weights, query, key, value, probs, lse, wanted, *options
        )
        answer: list[Tensor | None] = [None] * len(_NAMES)
        for i, asked, gradient in zip(_GRADIENT_AT, wanted, gradients, strict=True):
            answer[i] = gradient if asked else None
        return tuple(answer)


def _forward_formula(query, key, value, *rest):
    *options, return_max_logits, return_weights = rest
    result = reference.attention(query, key, value, **options_of(DENSE_OPTIONS, options))
    return (
        result.out,
        result.lse,
        result.max_logits if return_max_logits else absent(result.max_logits),
        result.weights if return_weights else absent(result.weights),
        result.probs,
    )


def _backward_formula(
    grad_out, grad_lse, grad_weights, query, key, value, _probs, _lse, wanted, *options
):
    named = options_of(DENSE_OPTIONS, options)
    gradients = reference.attention_backward(
        grad_out, grad_lse, query, key, value, grad_weights=grad_weights, **named
    )
    rest = (named["attn_mask"], named["alibi_slopes"], named["sinks"])
    return wanted_gradients(gradients, (query, key, value, *rest), wanted)


def _fake_forward(query, key, value, *rest):
    return_max_logits, return_weights = (*rest, *_naive.defaults[3 + len(rest) :])[-2:]
    check_dense(query, key, value, dict(zip(DENSE_OPTIONS, rest, strict=False)))
    pairs = (*query.shape[:3], key.size(2))
    real = reference.accumulation_dtype(query.dtype)
    max_logits_shape = query.shape[:2] if return_max_logits else (0,)
    return (
        empty_in_order_of(query, (*query.shape[:-1], value.size(-1))),
        query.new_empty(query.shape[:3], dtype=real),
        query.new_empty(max_logits_shape, dtype=torch.float32),
        query.new_empty(pairs if return_weights else (0,)),
        query.new_empty(pairs),
    )


def _fake_backward(grad_out, grad_lse, grad_weights, query, key, value, probs, lse, wanted, *rest):
    named = dict(zip(DENSE_OPTIONS, rest, strict=False))
    options = [named.get(name) for name in ("attn_mask", "alibi_slopes", "sinks")]
    return fake_gradients((query, key, value, *options), wanted)


_backward = differentiate_by_formula(_backward_op, _backward_formula)
_naive = DifferentiableOp(_forward_op, NaiveAttention, _forward_formula)
register_fake(_forward_op, _fake_forward)
register_fake(_backward_op, _fake_backward)
register_vmap(_forward_op, fold_into_batch(_forward_op))
register_vmap(_backward_op, fold_into_batch(_backward_op))
register_autocast(_forward_op, cast_inputs(tuple(_NAMES)))
define_public_with_results(
    "naive_attention",
    naive_attention,
    "Tensor query, Tensor key, Tensor value, *, Tensor? attn_mask=None, bool causal=False, "
    "SymInt?[]? window=None, str? alignment=None, Tensor? key_lengths=None, float dropout_p=0.0, "
    "float? scale=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "bool? deterministic=None, Tensor? rng_state=None",
    ("return_lse", "return_max_logits", "return_weights"),
)
