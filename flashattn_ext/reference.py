"""Attention as a formula: short, differentiable PyTorch, for tests and for higher derivatives.

Nothing here is fast and the scores are materialised. Every option of the fused ops is here, with
the same meaning at every edge, so that tests can compare any path with it, and so that double
backward and forward-mode differentiation of the fused ops have a formula to go through.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

DROPOUT_LEVELS = 65536  # keep rates are multiples of 1 / DROPOUT_LEVELS


class Attention(NamedTuple):
    """What the formula gives; see :func:`attention`."""

    out: Tensor  # (batch, heads_q, len_q, head_dim_v)
    lse: Tensor  # (batch, heads_q, len_q)
    max_logits: Tensor  # (batch, heads_q)
    weights: Tensor | None  # (batch, heads_q, len_q, len_k), after dropout
    probs: Tensor | None  # (batch, heads_q, len_q, len_k), before dropout


class Gradients(NamedTuple):
    """Gradients of the inputs, each shaped like its input; None where it is absent."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class _Steps(NamedTuple):
    """The formula up to the probabilities, in the accumulation dtype."""

    query: Tensor  # (batch, heads_q, len_q, head_dim)
    key: Tensor  # (batch, heads_kv, len_k, head_dim)
    value: Tensor  # (batch, heads_kv, len_k, head_dim_v)
    scale: float
    capped: Tensor  # (batch, heads_q, len_q, len_k): scores after softcap
    distance: Tensor | None  # (batch | 1, 1, len_q, len_k): from the diagonal, for ALiBi
    scores: Tensor  # (batch, heads_q, len_q, len_k): -inf where hidden
    probs: Tensor  # (batch, heads_q, len_q, len_k)
    sink_probs: Tensor  # (batch, heads_q, len_q): what the sink takes of each row
    lse: Tensor  # (batch, heads_q, len_q)
    keep: Tensor | None  # (batch, heads_q, len_q, len_k): dropout's factor, 0 or 1 / keep_rate


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def keep_rate(dropout_p: float) -> float:
    """The share of probabilities that dropout keeps: ``1 - dropout_p`` to 16 bits."""
    return math.floor((1 - dropout_p) * DROPOUT_LEVELS + 0.5) / DROPOUT_LEVELS


def attention(query: Tensor, key: Tensor, value: Tensor, *, dtype=None, **options) -> Attention:
    """Attention with every option of :func:`flashattn_ext.flash_attention`.

    Shapes: query (batch, heads_q, len_q, head_dim), key (batch, heads_kv, len_k, head_dim), value
    (batch, heads_kv, len_k, head_dim_v). Options: attn_mask, causal, window, alignment,
    key_lengths, dropout_p, scale, softcap, alibi_slopes, sinks, rng_state.

    Everything is computed in fp32 (fp64 for fp64 inputs) and `out`, `weights` and `probs` are
    rounded to the dtype of query; with `dtype` given, everything is computed and returned in it.
    """
    out_dtype = dtype or query.dtype
    with _no_autocast(query):
        steps = _forward_steps(query, key, value, dtype=dtype, **options)
        weights = steps.probs if steps.keep is None else steps.probs * steps.keep
        out = _by_kv_head(weights, steps.value)
        return Attention(
            out.to(out_dtype),
            steps.lse,
            _max_over_rows_and_keys(steps.scores),
            weights.to(out_dtype),
            steps.probs.to(out_dtype),
        )


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    grad_weights: Tensor | None = None,
    dtype=None,
    **options,
) -> Gradients:
    """Gradients of :func:`attention`, written out (Dao et al., arXiv:2205.14135, appendix B.2).

    grad_lse and grad_weights are the upstream gradients of `lse` and `weights`. Each gradient has
    the dtype of its input, or `dtype`. Differentiable itself.
    """
    attn_mask, alibi_slopes, sinks = (
        options.get(name) for name in ("attn_mask", "alibi_slopes", "sinks")
    )
    with _no_autocast(query):
        steps = _forward_steps(query, key, value, dtype=dtype, **options)
        real = steps.probs.dtype
        weights = steps.probs if steps.keep is None else steps.probs * steps.keep
        grad_out = grad_out.to(real)

        grad_probs = _by_kv_head(grad_out, steps.value.transpose(-1, -2))
        if grad_weights is not None:
            grad_probs = grad_probs + grad_weights.to(real)
        if steps.keep is not None:
            grad_probs = grad_probs * steps.keep
        delta = (steps.probs * grad_probs).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse.to(real)
        grad_scores = steps.probs * (grad_probs - delta.unsqueeze(-1))

        softcap = options.get("softcap", 0.0)
        slope = 1 - (steps.capped / softcap) ** 2 if softcap > 0 else 1
        grad_products = grad_scores * slope * steps.scale

        def as_input(grad, tensor):
            return grad.to(dtype or tensor.dtype)

        grad_mask = grad_alibi = grad_sinks = None
        if attn_mask is not None and attn_mask.is_floating_point():
            grad_mask = as_input(grad_scores.sum_to_size(attn_mask.shape), attn_mask)
        if alibi_slopes is not None:
            per_head = -(grad_scores * steps.distance).sum((-1, -2))
            grad_alibi = as_input(per_head.sum_to_size(alibi_slopes.shape), alibi_slopes)
        if sinks is not None:
            grad_sinks = as_input(-(steps.sink_probs * delta).sum((0, 2)), sinks)
        return Gradients(
            as_input(_by_kv_head(grad_products, steps.key), query),
            as_input(_sum_over_group(grad_products, steps.query, key.size(1)), key),
            as_input(_sum_over_group(weights, grad_out, value.size(1)), value),
            grad_mask,
            grad_alibi,
            grad_sinks,
        )


def attention_varlen(
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
    dtype=None,
    **options,
) -> Attention:
    """Packed attention: :func:`attention` of one sequence after the other.

    Shapes: query (total_q, heads_q, head_dim), key (total_k, heads_kv, head_dim), value (total_k,
    heads_kv, head_dim_v); `lse` (heads_q, total_q); `max_logits` (sequences, heads_q). Weights are
    not returned. Rows that belong to no sequence give out 0 and lse -inf.
    """
    rows = _spans(cu_seqlens_q, seqused_q, max_seqlen_q, query.size(0))
    keys = _spans(cu_seqlens_k, seqused_k, max_seqlen_k, key.size(0))
    results = [
        attention(
            *_sequence(query, key, value, row, col), dtype=dtype, **_of_sequence(options, b, query)
        )
        for b, (row, col) in enumerate(zip(rows, keys, strict=True))
    ]
    real = dtype or accumulation_dtype(query.dtype)
    empty_out = query.new_zeros((0, query.size(1), value.size(2)), dtype=dtype or query.dtype)
    empty_lse = query.new_zeros((0, query.size(1)), dtype=real)
    out = [result.out.squeeze(0).transpose(0, 1) for result in results]
    lse = [result.lse.squeeze(0).transpose(0, 1) for result in results]
    max_logits = [result.max_logits for result in results]
    return Attention(
        _scatter_rows(out, rows, query.size(0), 0.0, empty_out),
        _scatter_rows(lse, rows, query.size(0), -math.inf, empty_lse).transpose(0, 1),
        torch.cat(max_logits) if max_logits else empty_lse.to(torch.float32),
        None,
        None,
    )


def attention_varlen_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
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
    dtype=None,
    **options,
) -> Gradients:
    """Gradients of :func:`attention_varlen`; see :func:`attention_backward`."""
    rows = _spans(cu_seqlens_q, seqused_q, max_seqlen_q, query.size(0))
    keys = _spans(cu_seqlens_k, seqused_k, max_seqlen_k, key.size(0))
    parts = [
        attention_backward(
            grad_out[slice(*row)].transpose(0, 1).unsqueeze(0),
            None if grad_lse is None else grad_lse[:, slice(*row)].unsqueeze(0),
            *_sequence(query, key, value, row, col),
            dtype=dtype,
            **_of_sequence(options, b, query),
        )
        for b, (row, col) in enumerate(zip(rows, keys, strict=True))
    ]

    def packed(name, tensor, spans):
        pieces = [getattr(part, name).squeeze(0).transpose(0, 1) for part in parts]
        empty = tensor.new_zeros((0, *tensor.shape[1:]), dtype=dtype or tensor.dtype)
        return _scatter_rows(pieces, spans, tensor.size(0), 0.0, empty)

    def per_head(name, tensor):
        if tensor is None:
            return None
        pieces = [getattr(part, name).reshape(-1, tensor.size(-1)) for part in parts]
        pieces = torch.cat(pieces) if pieces else tensor.new_zeros((0, tensor.size(-1)))
        return pieces.sum_to_size(tensor.shape) if tensor.dim() == 2 else pieces.sum(0)

    return Gradients(
        packed("query", query, rows),
        packed("key", key, keys),
        packed("value", value, keys),
        None,
        per_head("alibi_slopes", options.get("alibi_slopes")),
        per_head("sinks", options.get("sinks")),
    )


def _forward_steps(
    query,
    key,
    value,
    *,
    attn_mask=None,
    causal=False,
    window=None,
    alignment=None,
    key_lengths=None,
    dropout_p=0.0,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    rng_state=None,
    dtype=None,
) -> _Steps:
    batch, heads_q, len_q, head_dim = query.shape
    len_k = key.size(2)
    real = dtype or accumulation_dtype(query.dtype)
    if scale is None:
        scale = 1 / math.sqrt(head_dim) if head_dim else 1.0
    query, key, value = (tensor.to(real) for tensor in (query, key, value))

    lengths = len_k  # keys in use
    if key_lengths is not None:
        lengths = key_lengths.to(torch.int64).reshape(-1, 1, 1, 1)
        # What is stored past a sequence's end must not even be multiplied by 0.
        used = torch.arange(len_k, device=key.device).reshape(1, 1, -1, 1) < lengths
        key, value = torch.where(used, key, 0), torch.where(used, value, 0)

    products = _by_kv_head(query, key.transpose(-1, -2)) * scale
    capped = softcap * torch.tanh(products / softcap) if softcap > 0 else products

    row = torch.arange(len_q, device=query.device).reshape(-1, 1)
    col = torch.arange(len_k, device=query.device)
    diagonal = row + (lengths - len_q if alignment == "bottom_right" else 0)
    left, right = window or (None, None)
    visible = col < (lengths if head_dim else 0)  # head_dim 0 leaves nothing to attend by
    if causal:
        visible = visible & (col <= diagonal)
    if left is not None:
        visible = visible & (col >= diagonal - left)
    if right is not None:
        visible = visible & (col <= diagonal + right)

    scores, distance = capped, None
    if alibi_slopes is not None:
        distance = (diagonal - col).abs().to(real)
        slopes = alibi_slopes.to(real).reshape(-1, heads_q, 1, 1)
        scores = scores - slopes * distance
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        hidden = attn_mask == -math.inf
        visible = visible & ~hidden
        scores = scores + torch.where(hidden, 0, attn_mask).to(real)
    scores = torch.where(visible, scores, -math.inf)

    # A sink is one more column of the row; without one, that column is hidden.
    sink = scores.new_full((1,), -math.inf) if sinks is None else sinks.to(real)
    sink = sink.reshape(1, -1, 1, 1).expand(batch, heads_q, len_q, 1)
    terms = torch.cat([scores, sink], -1)
    maximum = terms.detach().amax(-1, keepdim=True)
    maximum = torch.where(maximum == -math.inf, 0, maximum)
    powers = torch.exp(terms - maximum)
    total = powers.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -math.inf, maximum + torch.log(total)).squeeze(-1)
    probs = powers / total

    keep = None
    if dropout_p > 0:
        rate = keep_rate(dropout_p)
        kept = torch.ops.flashattn_ext.dropout_mask(
            rng_state, batch, heads_q, len_q, len_k, dropout_p
        )
        keep = kept.to(real) * (1 / rate if rate else 0.0)
    return _Steps(
        query, key, value, scale, capped, distance, scores,
        probs[..., :len_k], probs[..., len_k], lse, keep,
    )  # fmt: skip


def _by_kv_head(rows: Tensor, matrix: Tensor) -> Tensor:
    """(batch, heads_q, n, m) @ (batch, heads_kv, m, k): each query head with its key/value head."""
    batch, heads_q, n, m = rows.shape
    heads_kv, k = matrix.size(1), matrix.size(3)
    group = heads_q // heads_kv if heads_kv else 1
    product = rows.reshape(batch, heads_kv, group * n, m) @ matrix
    return product.reshape(batch, heads_q, n, k)


def _sum_over_group(left: Tensor, right: Tensor, heads_kv: int) -> Tensor:
    """(batch, heads_q, n, m)^T @ (batch, heads_q, n, k), summed over each group of query heads."""
    batch, heads_q, n, m = left.shape
    group = heads_q // heads_kv if heads_kv else 1
    left = left.reshape(batch, heads_kv, group * n, m)
    return left.transpose(-1, -2) @ right.reshape(batch, heads_kv, group * n, right.size(3))


def _max_over_rows_and_keys(scores: Tensor) -> Tensor:
    scores = scores.detach().flatten(2)
    if scores.size(2) == 0:
        return scores.new_full(scores.shape[:2], -math.inf, dtype=torch.float32)
    return scores.amax(-1).to(torch.float32)


def _spans(cu_seqlens: Tensor, used: Tensor | None, longest: int, total: int):
    """(begin, end) of the rows in use of each sequence."""
    offsets = [min(max(offset, 0), total) for offset in cu_seqlens.tolist()]
    lengths = [min(end - begin, longest) for begin, end in itertools.pairwise(offsets)]
    if used is not None:
        lengths = [min(length, n) for length, n in zip(lengths, used.tolist(), strict=True)]
    return [
        (begin, begin + max(length, 0)) for begin, length in zip(offsets, lengths, strict=False)
    ]


def _sequence(query, key, value, row, col):
    """One sequence of a packed batch as a dense batch of one."""
    query, key, value = query[slice(*row)], key[slice(*col)], value[slice(*col)]
    return tuple(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))


def _of_sequence(options: dict, sequence: int, query: Tensor) -> dict:
    """The options of a packed call, for one of its sequences."""
    options = dict(options)
    if options.get("alignment") is None:
        options["alignment"] = "bottom_right"
    alibi_slopes, rng_state = options.get("alibi_slopes"), options.get("rng_state")
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        options["alibi_slopes"] = alibi_slopes[sequence : sequence + 1]
    if rng_state is not None:
        # Dropout counts streams from the offset: the sequence's own begin heads_q further each.
        options["rng_state"] = torch.stack([rng_state[0], rng_state[1] + sequence * query.size(1)])
    return options


def _scatter_rows(pieces, spans, total: int, fill: float, empty: Tensor) -> Tensor:
    """The pieces at their spans of a tensor of `total` rows, `fill` elsewhere."""
    parts, position = [empty], 0
    for piece, (begin, end) in zip(pieces, spans, strict=True):
        parts += [empty.new_full((begin - position, *empty.shape[1:]), fill), piece]
        position = end
    parts.append(empty.new_full((total - position, *empty.shape[1:]), fill))
    return torch.cat(parts)


def _no_autocast(tensor: Tensor):
    return torch.autocast(tensor.device.type, enabled=False)
