"""flash_attention against the formula: every option, forward and backward."""

from __future__ import annotations

import pytest
import torch
from checks import Twins, check, check_call, flash_attention, random_upstream, run
from problems import DENSE_FACTORS, DTYPES, HEAD_DIMS, LENGTHS, VISIBLE, Problem, build, selection

import flashattn_ext

OPS = ("flash_attention_forward", "flash_attention_backward")


def by_name(problems):
    return pytest.mark.parametrize("problem", problems, ids=lambda problem: problem.name)


@by_name(selection(DENSE_FACTORS, seeds=(0, 1)))
def test_pairs_of_options(problem, device):
    check(flash_attention, problem, device)


@pytest.mark.parametrize("len_k", LENGTHS)
@pytest.mark.parametrize("len_q", LENGTHS)
def test_lengths_around_tile_edges(len_q, len_k, device):  # S18, S4, N16
    problem = Problem(
        batch=1,
        heads_q=1,
        heads_kv=1,
        len_q=len_q,
        len_k=len_k,
        head_dim=8,
        head_dim_v=5,
        causal=(len_q + len_k) % 2 == 0,
        alignment="bottom_right",
    )
    check(flash_attention, problem, device)


@pytest.mark.parametrize("lengths", [(449, 449), (130, 600), (600, 130), (1, 1500)], ids=str)
@pytest.mark.parametrize("visible", ["full", "causal_bottom_right", "causal_window"])
def test_many_tiles(visible, lengths, device):  # N16, N26, S18
    """Lengths of many tiles, with every gradient, so that tiles are joined in all ways."""
    options = {"mask": "float", "mask_shape": "1hqk", "alibi": "heads", "sinks": "fp32"}
    for dtype, others in (("bf16", {}), ("fp32", {**options, "dropout_p": 0.1})):
        problem = Problem(
            **{"alignment": "top_left", **VISIBLE[visible], **others},
            dtype=dtype,
            batch=1,
            len_q=lengths[0],
            len_k=lengths[1],
            head_dim=16,
            head_dim_v=8,
        )
        check(flash_attention, problem, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, dtype, device):  # S5, S7, S8: no padded scale, any head_dim_v
    head_dim_v = HEAD_DIMS[HEAD_DIMS.index(head_dim) - 3]
    problem = Problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, heads_q=4)
    check(flash_attention, problem, device)


@pytest.mark.parametrize("head_dim", range(1, 41))
def test_every_small_head_dim(head_dim, device):
    problem = Problem(batch=1, len_q=5, len_k=18, head_dim=head_dim, head_dim_v=41 - head_dim)
    check(flash_attention, problem, device)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(40, 40), (19, 70), (70, 19)], ids=str)
@pytest.mark.parametrize("visible", VISIBLE)
def test_visibility(visible, lengths, alignment, device):  # S3, W1, W3, W7
    options = {**VISIBLE[visible], "alignment": alignment}
    len_q, len_k = lengths
    for dtype in ("fp16", "fp32"):
        problem = Problem(dtype=dtype, len_q=len_q, len_k=len_k, head_dim=16, **options)
        check(flash_attention, problem, device)


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 4), (8, 2), (8, 1), (5, 1), (9, 3)], ids=str)
def test_grouped_heads(heads, device):  # G2, G3, G5, G6, S9, L10
    heads_q, heads_kv = heads
    for dtype in ("bf16", "fp32"):
        problem = Problem(
            dtype=dtype,
            batch=3,
            heads_q=heads_q,
            heads_kv=heads_kv,
            len_q=33,
            len_k=40,
            head_dim=24,
            head_dim_v=16,
            causal=True,
            alignment="bottom_right",
            layout="blhd",
        )
        check(flash_attention, problem, device)


@pytest.mark.parametrize("visible", ["full", "causal_bottom_right", "causal_window"])
@pytest.mark.parametrize("heads", [(8, 2), (20, 1), (3, 3)], ids=str)
def test_one_row_of_grouped_heads(heads, visible, device):
    """Decoding: keys split over blocks, the heads of a group in one tile or more."""
    heads_q, heads_kv = heads
    for layout, head_dim in (("blhd", 64), ("bhdl", 40), ("contiguous", 128)):
        for key_lengths in (None, (100, 30, 0)):
            problem = Problem(
                **{"alignment": "bottom_right", **VISIBLE[visible]},
                dtype="bf16",
                batch=3,
                heads_q=heads_q,
                heads_kv=heads_kv,
                len_q=1,
                len_k=1100,
                head_dim=head_dim,
                head_dim_v=head_dim,
                key_lengths=key_lengths,
                layout=layout,
            )
            check(flash_attention, problem, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_in_every_dtype(dtype, device):  # G2: decoding, with grouped heads
    problem = Problem(
        dtype=dtype, heads_q=8, heads_kv=2, len_q=1, len_k=300, head_dim=64, head_dim_v=64
    )
    check(flash_attention, problem, device)


def test_head_dim_256_with_16_heads_on_2(device):  # S9: wrong by 5x elsewhere, unseen by randn
    problem = Problem(
        dtype="bf16", heads_q=16, heads_kv=2, len_q=40, len_k=40, head_dim=256, head_dim_v=256,
        causal=True,
    )  # fmt: skip
    (query, key, value), options = build(problem, device)
    ramp = torch.linspace(0.5, 2.0, 256, device=device, dtype=query.dtype)
    check_call(flash_attention, [query * ramp, key * ramp.flip(0), value + ramp], options)


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("max_logits", [False, True])
def test_results_come_in_order(lse, max_logits, head_dim, device):
    (query, key, value), _ = build(Problem(len_q=5, head_dim=head_dim), device)
    every = flashattn_ext.flash_attention(
        query, key, value, return_lse=True, return_max_logits=True
    )
    assert isinstance(every, tuple) and len(every) == 3
    got = flashattn_ext.flash_attention(
        query, key, value, return_lse=lse, return_max_logits=max_logits
    )
    expected = [every[0]] + [every[1]] * lse + [every[2]] * max_logits
    if len(expected) == 1:
        assert isinstance(got, torch.Tensor)
        got = (got,)
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_max_logits_has_no_gradient(device):
    (query, key, value), _ = build(Problem(), device)
    query.requires_grad_()
    _, max_logits = flashattn_ext.flash_attention(query, key, value, return_max_logits=True)
    assert not max_logits.requires_grad


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-8, 3.5])
def test_any_scale(scale, device):
    check(flash_attention, Problem(scale=scale, heads_q=4, softcap=2.0), device)
    check(flash_attention, Problem(scale=scale, dtype="fp16"), device)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp32_means_fp32(head_dim, device):  # T1: no hidden TF32, no bf16 on the way
    problem = Problem(
        batch=1, len_q=300, len_k=300, head_dim=head_dim, head_dim_v=head_dim, causal=True
    )
    tensors, options = build(problem, device)
    upstream = random_upstream(tensors, packed=False)
    results, gradients = run(flash_attention, tensors, options, upstream)
    exact = Twins(tensors, options, upstream).exact
    pairs = [(results.out, exact[0].out), (results.lse, exact[0].lse)]
    for got, twin in pairs + [(gradients[name], exact[1][name]) for name in gradients]:
        assert (got.cpu() - twin).norm() < 1e-6 * twin.norm()
        assert (got.cpu() - twin).abs().max() < 1e-5 * twin.abs().max()


@pytest.mark.parametrize("lengths", [(40, 8000), (8000, 40)], ids=str)
def test_fp32_sums_of_many_terms(lengths, device):
    """Terms of one sign, so that what a sum loses at each step adds up: tensor cores truncate."""
    problem = Problem(
        batch=1, heads_q=1, heads_kv=1, len_q=lengths[0], len_k=lengths[1], head_dim=64,
        head_dim_v=64,
    )  # fmt: skip
    query, key, value = build(problem, device)[0]
    tensors = [query, key, value.abs()]
    upstream = [upstream.abs() for upstream in random_upstream(tensors, packed=False)]
    results, gradients = run(flash_attention, tensors, {}, upstream)
    exact = Twins(tensors, {}, upstream).exact
    pairs = [(results.out, exact[0].out), (gradients["value"], exact[1]["value"])]
    for got, twin in pairs:
        assert (got.cpu() - twin).abs().max() < 2e-6 * twin.abs().max()


def test_inputs_are_left_alone(device):
    problem = Problem(
        mask="float", alibi="batch", sinks="fp16", dropout_p=0.3, alignment="top_left"
    )
    tensors, options = build(problem, device)
    before = [t.clone() for t in (*tensors, *options.values()) if isinstance(t, torch.Tensor)]
    flashattn_ext.flash_attention(*tensors, **options)
    after = [t for t in (*tensors, *options.values()) if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_one_row_alone_equals_the_row_in_a_batch(device):  # X7
    (query, key, value), _ = build(Problem(batch=9, len_q=1, len_k=70), device)
    together = flashattn_ext.flash_attention(query, key, value)
    for b in range(9):
        part = slice(b, b + 1)
        assert torch.equal(
            flashattn_ext.flash_attention(query[part], key[part], value[part]), together[part]
        )
