"""naive_attention: the same meaning as flash_attention, with the weights to look at."""

from __future__ import annotations

import pytest
import torch
from checks import check, flash_attention, naive_attention, run
from conftest import has_cuda_kernel
from problems import DENSE_FACTORS, DTYPES, VISIBLE, Problem, build, selection
from tolerances import assert_close

import flashattn_ext

OPS = ("naive_attention_forward", "naive_attention_backward")


@pytest.mark.parametrize(
    "problem", selection(DENSE_FACTORS, seeds=(2,)), ids=lambda problem: problem.name
)
def test_pairs_of_options(problem, device):
    check(naive_attention, problem, device, weights=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("visible", VISIBLE)
def test_gradients_without_upstream_of_weights(visible, dtype, device):
    problem = Problem(dtype=dtype, head_dim=16, head_dim_v=8, **VISIBLE[visible])
    check(naive_attention, problem, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_flash_attention(dtype, device):  # N3
    if device == "cuda" and not has_cuda_kernel("flash_attention_forward"):
        pytest.skip("flash_attention has no CUDA kernel")
    problem = Problem(
        dtype=dtype, heads_q=4, mask="float_rows", softcap=5.0, alibi="heads", sinks="fp32",
        dropout_p=0.3, causal=True, alignment="bottom_right",
    )  # fmt: skip
    tensors, options = build(problem, device)
    naive, flash = (run(op, tensors, options)[0] for op in (naive_attention, flash_attention))
    # Either may be as far from the formula as the table allows: here only a coarse comparison.
    scale = torch.finfo(tensors[0].dtype).eps
    assert (naive.out.double() - flash.out.double()).abs().max() < 50 * scale
    assert_close("lse", naive.lse, flash.lse.double(), None, torch.float32)
    assert_close("max_logits", naive.max_logits, flash.max_logits.double(), None, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_probabilities(dtype, device):
    problem = Problem(dtype=dtype, mask="bool_rows", key_lengths=(100, 40), batch=2)
    tensors, options = build(problem, device)
    out, weights = flashattn_ext.naive_attention(*tensors, return_weights=True, **options)
    assert weights.dtype == tensors[0].dtype and weights.is_contiguous()
    assert weights.shape == (2, 2, 17, 33)
    seen = options["attn_mask"] & (
        torch.arange(33, device=device) < options["key_lengths"].view(2, 1, 1, 1)
    )
    assert not weights[~seen.expand_as(weights)].count_nonzero()
    sums = weights.double().sum(-1)
    rows = seen.expand_as(weights).any(-1)
    assert (sums[rows] - 1).abs().max() < 20 * torch.finfo(weights.dtype).eps
    assert not sums[~rows].count_nonzero() and not out[~rows].count_nonzero()


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("max_logits", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_results_come_in_order(lse, max_logits, weights, device):
    tensors, _ = build(Problem(len_q=5), device)
    every = flashattn_ext.naive_attention(
        *tensors, return_lse=True, return_max_logits=True, return_weights=True
    )
    got = flashattn_ext.naive_attention(
        *tensors, return_lse=lse, return_max_logits=max_logits, return_weights=weights
    )
    asked = (True, lse, max_logits, weights)
    expected = [result for result, wanted in zip(every, asked, strict=True) if wanted]
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
