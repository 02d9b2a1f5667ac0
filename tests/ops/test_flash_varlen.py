"""flash_attention_varlen against the formula; gaps, tails and empty sequences."""

from __future__ import annotations

import pytest
import torch
from checks import check, check_call, flash_attention_varlen, gap_rows, random_upstream, run
from problems import PACKED_FACTORS, VISIBLE, Problem, build, selection
from tolerances import assert_close

import flashattn_ext

OPS = ("flash_attention_varlen_forward", "flash_attention_varlen_backward")
NAN = float("nan")


@pytest.mark.parametrize(
    "problem", selection(PACKED_FACTORS, seeds=(0, 1, 2)), ids=lambda problem: problem.name
)
def test_pairs_of_options(problem, device):  # K2, X2
    check(flash_attention_varlen, problem, device)


def packed(lengths, **options):
    return Problem(lengths=tuple(lengths), head_dim=16, head_dim_v=12, **options)


@pytest.mark.parametrize("visible", ["full", "causal_bottom_right", "causal_window"])
def test_many_tiles(visible, device):
    """Sequences of many tiles among short ones: some tiles hold the end of one, others nothing."""
    lengths = [(3, 400), (321, 321), (0, 0), (1, 1), (200, 20), (130, 260)]
    for dtype in ("bf16", "fp32"):
        options = {"alibi": "batch", "sinks": "fp32", "dropout_p": 0.1, **VISIBLE[visible]}
        check(flash_attention_varlen, packed(lengths, dtype=dtype, gap=3, **options), device)


def test_one_query_each_grouped_heads_and_empty_sequences(device):  # V1
    lengths = [(1, 5), (0, 3), (1, 0), (1, 70), (0, 0)]
    for causal in (False, True):
        check(flash_attention_varlen, packed(lengths, heads_q=6, causal=causal), device)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_few_rows_and_many_keys(dtype, device):  # as in decoding, without gradients
    lengths = [(1, 1300), (3, 20), (0, 5), (5, 600), (2, 0), (1, 513)]
    for options in ({"heads_q": 4, "heads_kv": 2, "gap": 3}, {"causal": True, "window": (700, 3)}):
        more = {"dtype": dtype, "alibi": "batch", "sinks": "fp32", "dropout_p": 0.1, **options}
        check(flash_attention_varlen, packed(lengths, **more), device, backward=False)


def test_no_queries_but_keys(device):  # V2
    problem = packed([(0, 9), (7, 3), (0, 65)], dtype="fp16")
    _, gradients = check(flash_attention_varlen, problem, device)
    for name in ("key", "value"):
        assert not gradients[name][:9].count_nonzero()
        assert not gradients[name][12:].count_nonzero()
        assert gradients[name][9:12].count_nonzero()


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 0), (0, 0)], [(0, 4)], [(4, 0)]], ids=str)
def test_nothing_to_do(lengths, device):  # V3, P1
    for dtype in ("bf16", "fp64"):
        problem = packed(lengths, dtype=dtype, causal=True, sinks=None)
        results, gradients = check(flash_attention_varlen, problem, device)
        assert not results.out.count_nonzero()
        assert not any(gradient.count_nonzero() for gradient in gradients.values())


def test_short_keys_under_long_queries(device):  # N15
    problem = packed([(76, 1), (34, 1), (146, 1)], dtype="fp16", causal=True)
    check(flash_attention_varlen, problem, device)
    check(flash_attention_varlen, packed([(76, 1), (34, 1), (146, 1)], dropout_p=0.4), device)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_tail_rows_are_zero_and_harmless(dtype, dropout_p, device):  # V4, V5, V11, N20
    problem = packed([(13, 20), (37, 49)], dtype=dtype, dropout_p=dropout_p, causal=True)
    tensors, options = build(problem, device)
    upstream = random_upstream(tensors, packed=True)
    clean, clean_gradients = run(flash_attention_varlen, tensors, options, upstream)

    def with_tail(tensor, dim=0):
        tail = tensor.new_full([21 if d == dim else n for d, n in enumerate(tensor.shape)], NAN)
        return torch.cat([tensor, tail], dim)

    longer = [with_tail(tensor) for tensor in tensors]
    upstream = [with_tail(upstream[0]), with_tail(upstream[1], 1)]
    results, gradients = run(flash_attention_varlen, longer, options, upstream)
    assert torch.equal(results.out[:50], clean.out) and not results.out[50:].count_nonzero()
    assert torch.equal(results.lse[:, :50], clean.lse)
    assert (results.lse[:, 50:] == -float("inf")).all()
    for name, gradient in gradients.items():
        rows = clean_gradients[name].shape[0]
        assert torch.equal(gradient[:rows], clean_gradients[name]), name
        assert not gradient[rows:].count_nonzero(), name


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_gaps_are_zero_and_harmless(dtype, device):  # V7, V11, N20
    problem = packed([(13, 20), (0, 5), (37, 9), (5, 0)], dtype=dtype, gap=6, heads_q=4)
    tensors, options = build(problem, device)
    upstream = random_upstream(tensors, packed=True)
    clean, clean_gradients = run(flash_attention_varlen, tensors, options, upstream)
    gap_q, gap_k = (gap_rows(options, side, tensors[side == "k"].shape[0]) for side in "qk")

    poisoned = [tensor.clone() for tensor in tensors]
    poisoned[0][gap_q], poisoned[1][gap_k], poisoned[2][gap_k] = NAN, NAN, NAN
    bad_upstream = [upstream[0].clone(), upstream[1].clone()]
    bad_upstream[0][gap_q], bad_upstream[1][:, gap_q] = NAN, NAN
    results, gradients = run(flash_attention_varlen, poisoned, options, bad_upstream)
    assert torch.equal(results.out, clean.out) and torch.equal(results.lse, clean.lse)
    assert not results.out[gap_q].count_nonzero()
    for name, gap in (("query", gap_q), ("key", gap_k), ("value", gap_k)):
        assert torch.equal(gradients[name], clean_gradients[name]), name
        assert not gradients[name][gap].count_nonzero(), name


def test_used_rows_equal_the_compact_run(device):  # V7
    lengths = [(13, 20), (4, 5), (37, 9)]
    gappy, gappy_options = build(packed(lengths, gap=6), device)
    rows = [~gap_rows(gappy_options, side, gappy[side == "k"].shape[0]) for side in "qk"]
    compact = [gappy[0][rows[0]], gappy[1][rows[1]], gappy[2][rows[1]]]
    _, options = build(packed(lengths), device)
    a = flashattn_ext.flash_attention_varlen(*gappy, **gappy_options)
    b = flashattn_ext.flash_attention_varlen(*compact, **options)
    assert torch.equal(a[rows[0]], b)


def test_seqused_on_one_side_only(device):  # V9
    for side in "qk":
        tensors, options = build(packed([(13, 20), (8, 11)], gap=4), device)
        begins = options[f"cu_seqlens_{side}"]
        options.pop(f"seqused_{side}")
        assert options[f"max_seqlen_{side}"] >= int((begins[1:] - begins[:-1]).max())
        check_call(flash_attention_varlen, tensors, options)


def test_storage_before_the_first_sequence(device):
    tensors, options = build(packed([(13, 20), (8, 11)]), device)
    options["cu_seqlens_q"] = options["cu_seqlens_q"].clone()
    options["cu_seqlens_q"][0] = 5
    results, gradients = check_call(flash_attention_varlen, tensors, options)
    assert not results.out[:5].count_nonzero() and not gradients["query"][:5].count_nonzero()


def test_index_lists_of_any_kind(device):  # V10
    tensors, options = build(packed([(13, 20), (0, 4), (8, 11)]), device)
    expected = flashattn_ext.flash_attention_varlen(*tensors, **options)
    for dtype in (torch.int32, torch.int64):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            strided = torch.full((8,), -7, dtype=dtype, device=device)[::2]
            other = {**options, name: strided.copy_(options[name])}
            assert torch.equal(flashattn_ext.flash_attention_varlen(*tensors, **other), expected)


def test_a_larger_maximum_changes_nothing(device):
    tensors, options = build(packed([(13, 20), (8, 11)], causal=True), device)
    expected = flashattn_ext.flash_attention_varlen(*tensors, **options)
    more = {**options, "max_seqlen_q": 10**6, "max_seqlen_k": 2**40}
    assert torch.equal(flashattn_ext.flash_attention_varlen(*tensors, **more), expected)


@pytest.mark.parametrize("alignment", [None, "top_left", "bottom_right"])
def test_packed_equals_dense_calls(alignment, device):  # K3: one diagonal for all paths
    lengths = [(13, 20), (20, 13), (1, 33), (33, 33)]
    problem = packed(lengths, causal=True, alibi="batch", sinks="fp32", alignment=alignment)
    (query, key, value), options = build(problem, device)
    out = flashattn_ext.flash_attention_varlen(query, key, value, **options)
    q = k = 0
    for n, (len_q, len_k) in enumerate(lengths):
        one = [query[q : q + len_q], key[k : k + len_k], value[k : k + len_k]]
        dense = flashattn_ext.flash_attention(
            *(tensor.transpose(0, 1).unsqueeze(0) for tensor in one),
            causal=True,
            alignment=alignment or "bottom_right",
            alibi_slopes=options["alibi_slopes"][n],
            sinks=options["sinks"],
        )
        got = out[q : q + len_q].transpose(0, 1).unsqueeze(0)
        assert_close("out", got, dense, None, torch.float32)
        q, k = q + len_q, k + len_k


@pytest.mark.parametrize("count, length", [(1411, 135), (100_000, 2)])
def test_many_rows_and_many_sequences(count, length, device):  # V12, S11
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(count * length, 1, 8, generator=generator) for _ in range(3))
    cu = torch.arange(0, count * length + 1, length, dtype=torch.int32)
    tensors = [tensor.to(device).requires_grad_() for tensor in (query, key, value)]
    out = flashattn_ext.flash_attention_varlen(
        *tensors, cu.to(device), cu.to(device), length, length
    )
    grads = torch.autograd.grad(out.sum(), tensors)
    twins = [
        tensor.view(count, 1, length, 8).double().requires_grad_() for tensor in (query, key, value)
    ]
    scores = twins[0] @ twins[1].transpose(2, 3) / 8**0.5
    exact = scores.softmax(-1) @ twins[2]
    exact_grads = torch.autograd.grad(exact.sum(), twins)
    assert_close("out", out, exact.reshape(out.shape), None, torch.float32)
    for got, twin in zip(grads, exact_grads, strict=True):
        assert_close("gradient", got, twin.reshape(got.shape), None, torch.float32)
