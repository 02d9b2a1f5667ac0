"""The edges: nothing to attend to, NaN next door, logits of any size, huge strides."""

from __future__ import annotations

import math

import pytest
import torch
from checks import DENSE_OPS, check, check_call, flash_attention, random_upstream, run
from problems import DTYPES, Problem, build
from tolerances import assert_close

import flashattn_ext

OPS = ("flash_attention_forward", "flash_attention_backward")
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture(params=DENSE_OPS)
def op(request):
    return DENSE_OPS[request.param]


def small(**options):
    return Problem(**{"batch": 2, "heads_q": 4, "head_dim": 8, "head_dim_v": 8, **options})


def row(values, dtype=torch.float32, device="cpu"):
    """(1, 1, len(values), 1 or more): one head's rows."""
    tensor = torch.tensor(values, dtype=dtype, device=device)
    return tensor.reshape(1, 1, len(values), -1)


# ---- sizes of zero -------------------------------------------------------------------------------

EMPTY = {
    "batch": {"batch": 0},
    "heads": {"heads_q": 0, "heads_kv": 0},
    "len_q": {"len_q": 0},
    "len_k": {"len_k": 0},
    "both lengths": {"len_q": 0, "len_k": 0},
    "head_dim": {"head_dim": 0},
    "head_dim_v": {"head_dim_v": 0},
    "all": {"batch": 0, "heads_q": 0, "heads_kv": 0, "len_q": 0, "len_k": 0, "head_dim": 0},
}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_of_zero(dtype, empty, op, device):  # S1, S2, V3
    for options in (
        {},
        {"causal": True, "alignment": "bottom_right"},
        {"window": (3, 4), "alignment": "top_left", "softcap": 3.0},
        {"mask": "float", "alibi": "batch", "alignment": "top_left", "sinks": "fp32"},
        {"mask": "bool", "mask_shape": "1", "dropout_p": 0.5},
    ):
        problem = small(dtype=dtype, **{**options, **EMPTY[empty]})
        results, gradients = check(op, problem, device)
        if empty in ("len_k", "head_dim"):
            assert not results.out.count_nonzero()
            assert all(not gradients[name].count_nonzero() for name in ("query", "key", "value"))


def test_no_keys_but_a_sink(op, device):  # S2
    results, _ = check(op, small(len_k=0, sinks="fp32"), device)
    assert torch.isfinite(results.lse).all() and not results.out.count_nonzero()


@pytest.mark.parametrize("sink", [0.0, 5.0, -200.0, 1e4, -INFINITY])
def test_rows_with_nothing_but_the_sink(sink, op, device):
    tensors, _ = build(small(), device)
    mask = torch.ones(17, 33, dtype=torch.bool, device=device)
    mask[4:8] = False
    options = {"attn_mask": mask, "sinks": torch.full((4,), sink, device=device)}
    results, _ = check_call(op, tensors, options)
    assert (results.lse[:, :, 4:8] == sink).all()


# ---- NaN and infinity next door ------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_past_key_lengths_never_matters(dtype, bad, op, device):  # N20, V11
    for extra in ({}, {"mask": "float"}, {"causal": True, "alignment": "bottom_right"}):
        problem = small(dtype=dtype, len_k=70, key_lengths=(60, 0), dropout_p=0.2, **extra)
        tensors, options = build(problem, device)
        upstream = random_upstream(tensors, packed=False)
        clean, clean_gradients = run(op, tensors, options, upstream)
        query, key, value = (tensor.clone() for tensor in tensors)
        for b, used in enumerate(options["key_lengths"].tolist()):
            key[b, :, used:], value[b, :, used:] = bad, bad
            if "attn_mask" in options:
                options["attn_mask"][b, ..., used:] = NAN
        dirty, gradients = run(op, [query, key, value], options, upstream)
        assert torch.equal(dirty.out, clean.out) and torch.equal(dirty.lse, clean.lse)
        assert torch.equal(dirty.max_logits, clean.max_logits)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, clean_gradients[name]), name


@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_nan_stays_in_its_head(dtype, place, op, device):  # N22
    tensors, _ = build(small(dtype=dtype, heads_q=3, heads_kv=3, batch=3), device)
    clean = run(op, tensors, {})[0]
    dirty = [tensor.clone() for tensor in tensors]
    dirty[["query", "key", "value"].index(place)][1, 2, 5] = NAN
    results = run(op, dirty, {})[0]
    others = torch.ones(3, 3, dtype=torch.bool)
    others[1, 2] = False
    assert torch.equal(results.out[others], clean.out[others])
    assert torch.equal(results.lse[others], clean.lse[others])
    rows = slice(5, 6) if place == "query" else slice(None)
    assert torch.isnan(results.out[1, 2, rows]).all()
    if place != "value":
        assert torch.isnan(results.lse[1, 2, rows]).all()
    if place == "query":
        assert torch.equal(results.out[1, 2, :5], clean.out[1, 2, :5])


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_in_gradients_stays_in_its_head(place, op, device):  # N20, N22
    tensors, _ = build(small(heads_q=3, heads_kv=3, batch=2), device)
    upstream = random_upstream(tensors, packed=False)
    _, clean = run(op, tensors, {}, upstream)
    dirty = [tensor.clone() for tensor in tensors]
    dirty[["query", "key", "value"].index(place)][1, 2, 5] = NAN
    _, gradients = run(op, dirty, {}, upstream)
    others = torch.ones(2, 3, dtype=torch.bool)
    others[1, 2] = False
    for name, gradient in gradients.items():
        assert torch.equal(gradient[others], clean[name][others]), name


@pytest.mark.parametrize("place", ["key", "value"])
def test_nan_behind_a_mask_stays_in_its_head(place, op, device):  # N20
    tensors, _ = build(small(heads_q=2, len_q=20, len_k=20), device)
    clean = run(op, tensors, {"causal": True})[0]
    dirty = [tensor.clone() for tensor in tensors]
    dirty[["query", "key", "value"].index(place)][0, 0, 15] = NAN
    results = run(op, dirty, {"causal": True})[0]
    assert torch.isnan(results.out[0, 0, 15:]).all()
    assert torch.equal(results.out[1], clean.out[1])
    assert torch.equal(results.out[0, 1], clean.out[0, 1])
    if place == "key":
        assert torch.equal(results.lse[0, 0, :15], clean.lse[0, 0, :15])


# ---- logits of any size --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 3.0, 30.0, 100.0])
def test_large_logits(factor, dtype, op, device):  # N13, N16, N14
    tensors, _ = build(small(dtype=dtype, len_q=65, len_k=70), device)
    check_call(op, [tensor * factor for tensor in tensors[:2]] + [tensors[2]], {})


@pytest.mark.parametrize("factor", [10.0, 30.0, 100.0])
@pytest.mark.parametrize("head_dim", [32, 33, 64, 128])
def test_large_logits_of_wide_heads(head_dim, factor, op, device):
    """Backward makes the scores of forward to the last bit, or probabilities do not add up to 1."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "len_q": 65, "len_k": 70}
    tensors, _ = build(small(**sizes), device)
    check_call(op, [tensor * factor for tensor in tensors[:2]] + [tensors[2]], {})


@pytest.mark.parametrize("dtype, factor", [("fp16", 1e4), ("bf16", 1e5), ("fp32", 1e5)])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_logits_of_1e10(head_dim, dtype, factor, op, device):  # N13: of any finite size
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "len_q": 65, "len_k": 70}
    tensors, _ = build(small(dtype=dtype, **sizes), device)
    tensors = [tensor * factor for tensor in tensors[:2]] + [tensors[2]]
    results, _ = check_call(op, tensors, {}, backward=False)
    assert torch.isfinite(results.out).all() and torch.isfinite(results.lse).all()


@pytest.mark.parametrize("shift", [-5e4, -1000.0, -200.0, -122.0, -113.0, -89.0, 89.0, 200.0, 5e4])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_lse_far_from_zero(dtype, shift, op, device):  # N5, N10, N11, N13: no exp(-lse) anywhere
    for len_q, len_k in ((1, 40), (64, 65), (192, 64)):
        tensors, _ = build(small(dtype=dtype, len_q=len_q, len_k=len_k), device)
        bias = torch.full((1, 1, len_q, len_k), shift, device=device)
        check_call(op, tensors, {"attn_mask": bias})


def test_every_logit_far_below_zero(op, device):  # N5
    query = row([[-100.0] * 64], device=device).half()
    key = row([[60.0] * 64] * 3, device=device).half() * 0.1014
    value = torch.randn(1, 1, 1, 64, device=device).half().expand(1, 1, 3, 64)
    results, _ = check_call(op, [query, key, value], {})
    assert (results.out == value[:, :, :1]).all()
    assert -4900 < results.lse.item() < -4800


def test_a_masked_key_never_wins(op, device):  # N6
    query, key = row([[1.0]], device=device), row([[-30000.0], [5.0]], device=device)
    value = row([[1.0], [100.0]], device=device)
    mask = torch.tensor([True, False], device=device)
    for options in ({"attn_mask": mask}, {"key_lengths": torch.tensor([1], device=device)}):
        assert run(op, [query, key, value], options)[0].out.item() == 1.0
    assert (
        run(op, [query, key, value], {"causal": True, "alignment": "top_left"})[0].out.item() == 1.0
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_products_beyond_the_16_bit_range(dtype, op, device):  # N12
    query, key, value = build(small(dtype=dtype, head_dim=64, len_q=20, len_k=20), device)[0]
    query, key = query.sign() * 576, key.sign() * 382
    results, gradients = check_call(op, [query, key, value], {})
    assert torch.isfinite(results.out).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_query_one_key(dtype, op, device):  # N14
    tensors, _ = build(small(dtype=dtype, len_q=1, len_k=1, head_dim=16, head_dim_v=16), device)
    tensors = [tensor * 3 for tensor in tensors]
    grad_out = random_upstream(tensors, packed=False)[0]
    results, gradients = run(op, tensors, {}, [grad_out, None])
    assert torch.equal(results.out, tensors[2].repeat_interleave(2, 1))
    # fp32 dot products of 16-bit numbers agree to the last bit, but for the tensor cores' order.
    if tensors[0].element_size() == 2 and device == "cpu":
        assert not gradients["query"].count_nonzero() and not gradients["key"].count_nonzero()
    groups = grad_out.unflatten(1, (2, 2)).sum(2)
    assert torch.equal(gradients["value"], groups)
    check_call(op, tensors, {})


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_constant_inputs(dtype, op, device):  # N17
    tensors = [
        torch.full((2, 2, 30, 64), 1000.0, device=device).to(DTYPES[dtype]) for _ in range(3)
    ]
    results, gradients = check_call(op, tensors, {})
    assert (results.out - 1000).abs().max() <= 1e-3
    assert torch.isfinite(gradients["query"]).all()


def test_zero_inputs_of_40000_keys(device):  # S12
    query = torch.zeros(1, 1, 1, 8, device=device)
    zeros = torch.zeros(1, 1, 40_000, 8, device=device)
    out, lse = flashattn_ext.flash_attention(query, zeros, zeros, return_lse=True)
    assert not out.count_nonzero()
    assert abs(lse.item() - math.log(40_000)) < 1e-4


def test_a_mask_column_past_32767(device):  # S13
    query, key = torch.zeros(1, 1, 2, 4, device=device), torch.zeros(1, 1, 40_000, 4, device=device)
    value = torch.arange(40_000.0, device=device).reshape(1, 1, -1, 1)
    mask = torch.zeros(2, 40_000, dtype=torch.bool, device=device)
    mask[0, 32_800], mask[1, 39_999] = True, True
    out = flashattn_ext.flash_attention(query, key, value, attn_mask=mask)
    assert out.flatten().tolist() == [32_800.0, 39_999.0]


# ---- finfo.min is an ordinary number -------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_dtype", ["same", "fp32"])
def test_rows_of_finfo_min(mask_dtype, dtype, op, device):  # N4: the mean of V
    tensors, _ = build(small(dtype=dtype, len_k=40), device)
    kind = tensors[0].dtype if mask_dtype == "same" else torch.float32
    mask = torch.zeros(2, 1, 17, 40, dtype=kind, device=device)
    mask[:, :, 2:11] = torch.finfo(kind).min
    results, gradients = check_call(op, tensors, {"attn_mask": mask})
    assert torch.isfinite(results.out).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    if kind == torch.float32:
        mean = tensors[2].double().mean(2, keepdim=True).repeat_interleave(2, 1)
        got = results.out[:, :, 2:11]
        assert_close("mean", got, mean.expand(got.shape), None, tensors[0].dtype)


def test_finfo_min_in_part_of_a_row(op, device):  # N4
    for dtype in DTYPES:
        check(op, small(dtype=dtype, mask="finfo_min"), device)
        check(
            op, small(dtype=dtype, mask="finfo_min_rows", causal=True, alignment="top_left"), device
        )


# ---- many and far apart --------------------------------------------------------------------------


@pytest.mark.parametrize("batch, heads", [(70_000, 1), (1, 70_000), (2_800, 4)])
def test_many_heads_and_batches(batch, heads, device):  # S10, N18
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(batch, heads, 2, 8, generator=generator) for _ in range(3)]
    leaves = [tensor.to(device).requires_grad_() for tensor in tensors]
    out = flashattn_ext.flash_attention(*leaves)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    twins = [tensor.double().requires_grad_() for tensor in tensors]
    exact = ((twins[0] @ twins[1].transpose(2, 3)) / 8**0.5).softmax(-1) @ twins[2]
    exact_gradients = torch.autograd.grad(exact.square().sum(), twins)
    assert_close("out", out, exact, None, torch.float32)
    for got, twin in zip(gradients, exact_gradients, strict=True):
        assert_close("gradient", got, twin, None, torch.float32)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_past_two_to_the_31(dim, untouched_malloc):  # S16, S17, C1, V12, L4
    """Two rows lie more than 2^31 elements apart. Only the touched pages cost memory."""
    far = 2**31 + 4096
    shape = [1, 1, 1, 4]
    shape[dim] = 2
    strides = [far if d == dim else 4 for d in range(3)] + [1]
    storage = torch.empty(far + 16, dtype=torch.float16)
    view = storage.as_strided(shape, strides)
    view.copy_(torch.randn(shape))
    near = view.clone()
    for place in range(3):
        tensors = [near.clone() for _ in range(3)]
        tensors[place] = view
        expected = [near.clone() for _ in range(3)]
        a, b = (
            run(flash_attention, x, {}, random_upstream(expected, False))
            for x in (tensors, expected)
        )
        assert torch.equal(a[0].out, b[0].out)
        for name in a[1]:
            assert torch.equal(a[1][name], b[1][name]), name


@pytest.mark.parametrize("stride", [2**31 + 64, 2**32 + 64])
def test_mask_offsets_past_two_to_the_31(stride, untouched_malloc):  # S13, S14, S15, M8
    storage = torch.empty(3 * stride + 64, dtype=torch.bool)
    mask = storage.as_strided((4, 9), (stride, 1))
    keep = torch.rand(4, 9) < 0.5
    mask.copy_(keep)
    tensors = [torch.randn(1, 2, length, 8) for length in (4, 9, 9)]
    a, b = (run(flash_attention, tensors, {"attn_mask": m})[0] for m in (mask, keep))
    assert torch.equal(a.out, b.out)
