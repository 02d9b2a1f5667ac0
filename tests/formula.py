"""The attention formula of the package, written for clarity: what every op is tested against.

Plain torch on dense scores, one sequence after the other, with gradients by torch's autograd. It
shares no code with the package. In fp64 (the default) it is the exact answer; run in the dtype of
the inputs it is "the same formula run eagerly by torch", which the tolerance table compares with.

Shapes: query (batch, heads_q, len_q, head_dim), key (batch, heads_kv, len_k, head_dim),
value (batch, heads_kv, len_k, head_dim_v); packed: (total, heads, head_dim).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

INFINITY = float("inf")


class Results(NamedTuple):
    out: torch.Tensor  # (batch, heads_q, len_q, head_dim_v); packed: (total_q, heads_q, head_dim_v)
    lse: torch.Tensor  # (batch, heads_q, len_q); packed: (heads_q, total_q)
    max_logits: torch.Tensor  # (batch or sequences, heads_q)
    weights: torch.Tensor | None  # (batch, heads_q, len_q, len_k), after dropout; None for packed


# ---- dropout -------------------------------------------------------------------------------------


def philox4x32(counter, key, rounds):
    """Philox4x32 of Salmon et al. (SC 2011). `counter`: 4 arrays, `key`: 2 of 32-bit words."""
    low32 = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(rounds):
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & low32,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & low32,
        )
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_threshold(dropout_p):
    return math.floor((1.0 - dropout_p) * 65536 + 0.5)


def keep_mask(rng_state, sequence, heads_q, len_q, len_k, dropout_p):
    """True where a probability of one sequence is kept: bool (heads_q, len_q, len_k)."""
    seed, offset = (int(word) % 2**64 for word in rng_state.tolist())
    position = [(offset + sequence * heads_q + head) % 2**64 for head in range(heads_q)]
    position = np.array(position, dtype=np.uint64).reshape(heads_q, 1, 1)
    row = np.arange(len_q, dtype=np.uint64).reshape(1, len_q, 1)
    col = np.arange(len_k, dtype=np.uint64).reshape(1, 1, len_k)
    group = (col // 32) * 4 + (col // 2) % 4
    slot = ((col // 8) % 4) * 2 + col % 2
    full = (heads_q, len_q, len_k)
    words = philox4x32(
        [
            np.broadcast_to(position & np.uint64(0xFFFFFFFF), full),
            np.broadcast_to(position >> np.uint64(32), full),
            np.broadcast_to(row, full),
            np.broadcast_to(group, full),
        ],
        (seed & 0xFFFFFFFF, seed >> 32),
        rounds=7,
    )
    word = np.choose(np.broadcast_to(slot // 2, full).astype(np.int64), words)
    number = (word >> (np.uint64(16) * (slot % 2))) & np.uint64(0xFFFF)
    return torch.from_numpy(number < dropout_threshold(dropout_p))


# ---- visibility ----------------------------------------------------------------------------------


def visible_pairs(len_q, len_k, *, causal=False, window=None, alignment=None):
    """What causality and window let a query see, bool (len_q, len_k), and the diagonal's shift."""
    shift = len_k - len_q if alignment == "bottom_right" else 0
    row = torch.arange(len_q).unsqueeze(1)
    col = torch.arange(len_k).unsqueeze(0)
    left, right = window if window is not None else (None, None)
    visible = torch.ones(len_q, len_k, dtype=torch.bool)
    if causal:
        visible &= col <= row + shift
    if left is not None:
        visible &= col >= row + shift - left
    if right is not None:
        visible &= col <= row + shift + right
    return visible, shift


# ---- one sequence --------------------------------------------------------------------------------


def log_sum_exp(terms):
    """Over the last dimension. Unlike torch.logsumexp, its gradient is right for terms as low as
    finfo.min: it never subtracts the result, which has lost the logarithm of the sum by then."""
    largest = terms.detach().amax(-1, keepdim=True)
    return largest.squeeze(-1) + (terms - largest).exp().sum(-1).log()


class StoredSoftmax(torch.autograd.Function):
    """Softmax over the last dimension, its result rounded to another dtype, for backward too."""

    @staticmethod
    def forward(ctx, terms, dtype):
        probs = torch.softmax(terms, -1).to(dtype).to(terms.dtype)
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx, grad):
        (probs,) = ctx.saved_tensors
        return probs * (grad - (probs * grad).sum(-1, keepdim=True)), None


def softmax_of_values(terms, value, keep_factor, stored=None):
    """(out, lse, weights) from `terms` (heads_q, len_q, len_k + 1), whose last column is the sink.

    A row of nothing but -inf has no keys: out 0, lse -inf.
    """
    empty = (terms == -INFINITY).all(-1, keepdim=True)
    safe = terms.masked_fill(empty, 0.0)
    lse = log_sum_exp(safe).masked_fill(empty.squeeze(-1), -INFINITY)
    probs = torch.softmax(safe, -1) if stored is None else StoredSoftmax.apply(safe, stored)
    weights = probs.masked_fill(empty, 0.0)[..., :-1] * keep_factor
    return weights @ value, lse, weights


class SumOfMagnitudes(torch.autograd.Function):
    """`softmax_of_values`, but its backward adds up the magnitudes of all terms of the gradient.

    `linear_terms` stands in for `terms` in backward: the scores with every factor made positive.
    """

    @staticmethod
    def forward(ctx, terms, linear_terms, value, keep_factor):
        ctx.save_for_backward(terms, value, keep_factor)
        return softmax_of_values(terms, value, keep_factor)

    @staticmethod
    def backward(ctx, grad_out, grad_lse, grad_weights):
        terms, value, keep_factor = ctx.saved_tensors
        _, _lse, weights = softmax_of_values(terms, value, keep_factor)
        empty = (terms == -INFINITY).all(-1, keepdim=True)
        probs = torch.softmax(terms.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        grad_probs = grad_out.abs() @ value.abs().transpose(1, 2) + grad_weights.abs()
        grad_probs = torch.nn.functional.pad(grad_probs * keep_factor, (0, 1))
        delta = (probs * grad_probs).sum(-1) + grad_lse.abs()
        grad_terms = probs * (grad_probs + delta.unsqueeze(-1))
        return None, grad_terms, weights.transpose(1, 2) @ grad_out.abs(), None


def one_sequence(
    query,  # (heads_q, len_q, head_dim)
    key,  # (heads_kv, len_k, head_dim)
    value,  # (heads_kv, len_k, head_dim_v)
    *,
    bias=None,  # bool or float (heads_q, len_q, len_k)
    slopes=None,  # (heads_q)
    sinks=None,  # (heads_q)
    keep=None,  # bool (heads_q, len_q, len_k)
    keep_rate=1.0,
    causal=False,
    window=None,
    alignment=None,
    scale=None,
    softcap=0.0,
    dtype=torch.float64,
    stored=None,  # dtype in which the probabilities are stored, if not `dtype`
    magnitudes=False,  # gradients become the sums of the magnitudes of their terms
):
    heads_q, len_q, head_dim = query.shape
    heads_kv, len_k, _ = key.shape
    device = query.device
    group = heads_q // heads_kv if heads_kv else 1
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0

    pairs, shift = visible_pairs(len_q, len_k, causal=causal, window=window, alignment=alignment)
    visible = pairs.to(device).expand(heads_q, len_q, len_k)
    if head_dim == 0:  # nothing to attend by: the same as no keys
        visible = torch.zeros_like(visible)
    if bias is not None:
        visible = visible & (bias if bias.dtype == torch.bool else bias != -INFINITY)
    row = torch.arange(len_q, device=device).unsqueeze(1)
    distance = (row + shift - torch.arange(len_k, device=device)).abs().to(dtype)
    keep_factor = torch.ones((), dtype=dtype, device=device)
    if keep is not None:
        keep_factor = keep.to(device).to(dtype) * (1.0 / keep_rate if keep_rate else 0.0)

    def terms(query, key, scale, softcap):
        scores = scale * (query @ key.transpose(1, 2))
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None and bias.dtype != torch.bool:
            scores = scores + bias.to(dtype)
        if slopes is not None:
            scores = scores - slopes.to(dtype).reshape(heads_q, 1, 1) * distance
        scores = scores.masked_fill(~visible, -INFINITY)
        # One more column, the sink, makes rows without keys an ordinary case. It has no value.
        sink = scores.new_full((heads_q,), -INFINITY) if sinks is None else sinks.to(dtype)
        return torch.cat([scores, sink.reshape(heads_q, 1, 1).expand(heads_q, len_q, 1)], -1)

    actual = terms(query, key, scale, softcap)
    if magnitudes:
        linear = terms(query.abs(), key.abs(), abs(scale), 0.0)
        out, lse, weights = SumOfMagnitudes.apply(actual.detach(), linear, value.abs(), keep_factor)
    else:
        out, lse, weights = softmax_of_values(actual, value, keep_factor, stored)
    seen = actual.detach()[..., :-1].flatten(1)
    lowest = seen.new_full((heads_q, 1), -INFINITY)
    max_logits = torch.cat([seen, lowest], 1).amax(1) if heads_q else lowest.flatten()
    return out, lse, max_logits, weights


# ---- dense and packed calls ----------------------------------------------------------------------


def _dropout(rng_state, sequence, heads_q, len_q, len_k, dropout_p):
    if dropout_p == 0:
        return {}
    keep = keep_mask(rng_state, sequence, heads_q, len_q, len_k, dropout_p)
    return {"keep": keep, "keep_rate": dropout_threshold(dropout_p) / 65536}


def _slopes(alibi_slopes, sequence):
    if alibi_slopes is None or alibi_slopes.dim() == 1:
        return alibi_slopes
    return alibi_slopes[sequence]


def attention(
    query,
    key,
    value,
    *,
    attn_mask=None,
    key_lengths=None,
    alibi_slopes=None,
    rng_state=None,
    dropout_p=0.0,
    dtype=torch.float64,
    **options,  # causal, window, alignment, scale, softcap, sinks
):
    """Dense attention of all sequences of a batch, each with its own number of keys in use."""
    batch, heads_q, len_q, _ = query.shape
    len_k = key.shape[2]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads_q, len_q, len_k)
    lengths = [len_k] * batch if key_lengths is None else key_lengths.tolist()
    parts = []
    for b, length in enumerate(lengths):
        out, lse, max_logits, weights = one_sequence(
            query[b],
            key[b, :, :length],
            value[b, :, :length],
            bias=None if attn_mask is None else attn_mask[b, :, :, :length],
            slopes=_slopes(alibi_slopes, b),
            dtype=dtype,
            **_dropout(rng_state, b, heads_q, len_q, length, dropout_p),
            **options,
        )
        weights = torch.nn.functional.pad(weights, (0, len_k - length))
        parts.append((out, lse, max_logits, weights))
    if not parts:
        shapes = [(0, heads_q, len_q, value.shape[3]), (0, heads_q, len_q), (0, heads_q)]
        shapes.append((0, heads_q, len_q, len_k))
        nothing = (query.sum() + key.sum() + value.sum()).to(dtype)  # 0, for zero gradients
        return Results(*(nothing.new_zeros(shape) + nothing for shape in shapes))
    return Results(*(torch.stack(column) for column in zip(*parts, strict=True)))


def packed_attention(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    seqused_q=None,
    seqused_k=None,
    alibi_slopes=None,
    rng_state=None,
    dropout_p=0.0,
    alignment="bottom_right",
    dtype=torch.float64,
    **options,  # causal, window, scale, softcap, sinks
):
    """Packed attention: each sequence is cut out, attended alone, and put back; the rest is 0."""
    total_q, heads_q, _ = query.shape
    begins_q, begins_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = query.new_zeros((total_q, heads_q, value.shape[2]), dtype=dtype)
    lse = query.new_full((heads_q, total_q), -INFINITY, dtype=dtype)
    max_logits = []
    for n in range(len(begins_q) - 1):
        used_q = begins_q[n + 1] - begins_q[n] if seqused_q is None else int(seqused_q[n])
        used_k = begins_k[n + 1] - begins_k[n] if seqused_k is None else int(seqused_k[n])
        rows = slice(begins_q[n], begins_q[n] + used_q)
        keys = slice(begins_k[n], begins_k[n] + used_k)
        out_n, lse_n, max_n, _ = one_sequence(
            query[rows].transpose(0, 1),
            key[keys].transpose(0, 1),
            value[keys].transpose(0, 1),
            slopes=_slopes(alibi_slopes, n),
            alignment=alignment,
            dtype=dtype,
            **_dropout(rng_state, n, heads_q, used_q, used_k, dropout_p),
            **options,
        )
        index = torch.arange(rows.start, rows.stop, device=query.device)
        out = out.index_copy(0, index, out_n.transpose(0, 1))
        lse = lse.index_copy(1, index, lse_n)
        max_logits.append(max_n)
    if not max_logits:  # no sequence: zeros, with zero gradients
        nothing = sum(tensor[:0].sum() for tensor in (query, key, value)).to(dtype)
        out, lse = out + nothing, lse + nothing
    empty = query.new_zeros((0, heads_q), dtype=dtype)
    return Results(out, lse, torch.stack(max_logits) if max_logits else empty, None)


def merge_states(out_a, lse_a, out_b, lse_b, *, dtype=torch.float64):
    """The attention over two disjoint sets of keys, from that over each: (out, lse)."""
    out_a, lse_a, out_b, lse_b = (t.to(dtype) for t in (out_a, lse_a, out_b, lse_b))
    empty = (lse_a == -INFINITY) & (lse_b == -INFINITY)
    pair = torch.stack([lse_a, lse_b], -1).masked_fill(empty.unsqueeze(-1), 0.0)
    lse = log_sum_exp(pair).masked_fill(empty, -INFINITY)
    share = torch.softmax(pair, -1).masked_fill(empty.unsqueeze(-1), 0.0)
    return share[..., :1] * out_a + share[..., 1:] * out_b, lse
