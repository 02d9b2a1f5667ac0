"""Floating-point operations of the ops, for torch.utils.flop_counter.FlopCounterMode.

Counted as torch counts its own attention: 2 for a multiply-add, dense calls as the full square of
len_q * len_k whatever is masked. Packed calls count each sequence's own lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

ops = torch.ops.flashattn_ext


def attention_flops(pairs: int, head_dim: int, head_dim_v: int) -> int:
    """Forward: the products with key and with value, for `pairs` pairs of query and key rows."""
    return 2 * pairs * (head_dim + head_dim_v)


def attention_backward_flops(
    pairs: int, head_dim: int, head_dim_v: int, wanted, scores_kept: bool
) -> int:
    """Backward, of the gradients asked for: scores anew, probabilities, value, query, key."""
    query, key, value, *others = wanted
    probabilities = query or key or any(others)
    score_products = (not scores_kept) + query + key
    value_products = probabilities + value
    return 2 * pairs * (score_products * head_dim + value_products * head_dim_v)


@register_flop_formula([ops.flash_attention_forward, ops.naive_attention_forward])
def _dense_forward(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return attention_flops(_dense_pairs(query, key), query[-1], value[-1])


@register_flop_formula(ops.flash_attention_backward)
def _flash_backward(
    grad_out, grad_lse, query, key, value, out, lse, out_low, lse_low, wanted, *args,
    out_shape=None, **kwargs,
) -> int:  # fmt: skip
    pairs = _dense_pairs(query, key)
    return attention_backward_flops(pairs, query[-1], value[-1], wanted, scores_kept=False)


@register_flop_formula(ops.naive_attention_backward)
def _naive_backward(
    grad_out, grad_lse, grad_weights, query, key, value, probs, lse, wanted, *args, out_shape=None,
    **kwargs,
) -> int:  # fmt: skip
    pairs = _dense_pairs(query, key)
    return attention_backward_flops(pairs, query[-1], value[-1], wanted, scores_kept=True)


@register_flop_formula(ops.flash_attention_varlen_forward, get_raw=True)
def _varlen_forward(query, key, value, *args, out_val=None, **kwargs) -> int:
    return attention_flops(_packed_pairs(query, *args[:4]), query.size(-1), value.size(-1))


@register_flop_formula(ops.flash_attention_varlen_backward, get_raw=True)
def _varlen_backward(grad_out, grad_lse, query, key, value, *args, out_val=None, **kwargs) -> int:
    pairs, wanted = _packed_pairs(query, *args[:4]), args[8]
    sizes = (pairs, query.size(-1), value.size(-1))
    return attention_backward_flops(*sizes, wanted, scores_kept=False)


def _dense_pairs(query, key) -> int:
    batch, heads_q, len_q, _ = query
    return batch * heads_q * len_q * key[2]


def _packed_pairs(query: Tensor, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> int:
    if isinstance(cu_seqlens_q, FakeTensor) or cu_seqlens_q.is_meta:
        # No values to read: at most this.
        return query.size(1) * (cu_seqlens_q.size(0) - 1) * max_seqlen_q * max_seqlen_k
    lengths_q, lengths_k = (cu.to(torch.int64).diff() for cu in (cu_seqlens_q, cu_seqlens_k))
    return query.size(1) * int((lengths_q * lengths_k).sum())
