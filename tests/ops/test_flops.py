"""FLOP counts, as torch counts its own attention."""

from __future__ import annotations

import pytest
import torch
from calls import attention_inputs
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext

SIZES = {"batch": 2, "heads_q": 4, "heads_kv": 4, "len_q": 8, "len_k": 16, "head_dim": 8}


def count(function, tensors, backward):
    tensors = [tensor.detach().requires_grad_(backward) for tensor in tensors]
    with FlopCounterMode(display=False) as counter:
        out = function(*tensors)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_counts_as_torch_does(causal, backward):
    """The full square, whatever is masked."""
    tensors = attention_inputs(torch.float32, head_dim_v=8, **SIZES)
    expected = 2 * 2 * 4 * 8 * 16 * (8 + 8)  # forward: two products
    if backward:
        expected += 2 * 2 * 4 * 8 * 16 * (3 * 8 + 2 * 8)
    options = {"causal": causal, "alignment": "top_left"}
    ours = count(lambda *t: flashattn_ext.flash_attention(*t, **options), tensors, backward)
    assert ours == expected
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        # torch's unfused path keeps the scores: one product fewer in backward.
        theirs = count(
            lambda *t: scaled_dot_product_attention(*t, is_causal=causal), tensors, backward
        )
    naive = count(lambda *t: flashattn_ext.naive_attention(*t, **options), tensors, backward)
    assert naive == theirs


def test_the_formula_is_that_of_torch():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    from flashattn_ext import _flops

    query, key, value = (2, 4, 8, 12), (2, 4, 16, 12), (2, 4, 16, 20)
    pairs = 2 * 4 * 8 * 16
    assert _flops.attention_flops(pairs, 12, 20) == sdpa_flop_count(query, key, value)
    wanted = [True, True, True, False, False, False]
    ours = _flops.attention_backward_flops(pairs, 12, 20, wanted, scores_kept=False)
    assert ours == sdpa_backward_flop_count((2, 4, 8, 20), query, key, value)


def test_grouped_heads_count_query_heads():
    tensors = attention_inputs(torch.float32, **{**SIZES, "heads_kv": 2, "head_dim_v": 4})
    assert count(flashattn_ext.flash_attention, tensors, False) == 2 * 2 * 4 * 8 * 16 * (8 + 4)


def test_only_the_gradients_asked_for():
    query, key, value = attention_inputs(torch.float32, head_dim_v=8, **SIZES)
    value.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        flashattn_ext.flash_attention(query, key, value).sum().backward()
    product = 2 * 2 * 4 * 8 * 16 * 8
    assert counter.get_total_flops() == 2 * product + 2 * product  # scores anew, value's gradient


@pytest.mark.parametrize("backward", [False, True])
def test_packed_counts_each_sequence(backward):
    lengths = (3, 5, 0, 7)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [torch.randn(sum(lengths), 2, 8) for _ in range(3)]

    def attend(*tensors):
        return flashattn_ext.flash_attention_varlen(*tensors, offsets, offsets, 7, 7)

    dense = sum(
        count(flashattn_ext.flash_attention, [torch.randn(1, 2, n, 8) for _ in range(3)], backward)
        for n in lengths
    )
    assert count(attend, tensors, backward) == dense
