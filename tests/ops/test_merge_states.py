"""merge_states: attention over parts of the keys, joined, is attention over all of them."""

from __future__ import annotations

import formula
import pytest
import torch
from problems import DTYPES, Problem, build
from tolerances import accumulator, assert_close

import flashattn_ext

OPS = ("flash_attention_forward",)
INFINITY, NAN = float("inf"), float("nan")


def states(device, dtype="fp32", shape=(2, 3, 5), head_dim=8, spread=3.0):
    """Two random states (out_a, lse_a, out_b, lse_b)."""
    kind = DTYPES[dtype]
    generator = torch.Generator().manual_seed(8)
    parts = []
    for _ in range(2):
        parts.append(torch.randn(*shape, head_dim, generator=generator).to(kind))
        parts.append((torch.randn(shape, generator=generator) * spread).to(accumulator(kind)))
    return [part.to(device) for part in parts]


@pytest.mark.parametrize(
    "splits", [(20, 13), (33, 0), (0, 33), (1, 32), (16, 16, 1), (5, 0, 28)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_make_the_whole(dtype, splits, device):  # C6, N8
    problem = Problem(dtype=dtype, len_k=33, heads_q=4)
    (query, key, value), _ = build(problem, device)
    whole = flashattn_ext.flash_attention(query, key, value, return_lse=True)
    state = None
    for k, v in zip(key.split(splits, 2), value.split(splits, 2), strict=True):
        part = flashattn_ext.flash_attention(query, k, v, return_lse=True)
        state = part if state is None else flashattn_ext.merge_states(*state, *part)
    assert state[0].dtype == query.dtype and state[1].dtype == whole[1].dtype
    exact = formula.attention(*(tensor.cpu() for tensor in (query, key, value)))
    eager = formula.attention(*(tensor.cpu() for tensor in (query, key, value)), dtype=query.dtype)
    assert_close("lse", state[1], exact.lse, None, query.dtype)
    merges = len(splits) - 1  # each rounds once more
    for _ in range(merges):
        eager = eager._replace(
            out=eager.out + (eager.out - exact.out.to(eager.out.dtype)).abs().max()
        )
    assert_close("out", state[0], exact.out, eager.out, query.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_formula(dtype, device):
    parts = states(device, dtype)
    leaves = [part.requires_grad_() for part in parts]
    out, lse = flashattn_ext.merge_states(*leaves)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad([out, lse], leaves, upstream)
    exact_leaves = [part.detach().double().cpu().requires_grad_() for part in parts]
    exact = formula.merge_states(*exact_leaves)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, [g.double().cpu() for g in upstream])
    assert_close("out", out, exact[0], None, parts[0].dtype)
    assert_close("lse", lse, exact[1], None, parts[0].dtype)
    for name, got, twin, part in zip("abcd", gradients, exact_gradients, parts, strict=True):
        assert got.dtype == part.dtype
        assert_close(f"gradient {name}", got, twin, None, parts[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_part_changes_nothing(dtype, device):  # N8
    out_a, lse_a, out_b, lse_b = states(device, dtype)
    empty = torch.full_like(lse_b, -INFINITY)
    for junk in (0.0, 7.0, INFINITY, NAN):
        filled = torch.full_like(out_b, junk)
        for merged in (
            flashattn_ext.merge_states(out_a, lse_a, filled, empty),
            flashattn_ext.merge_states(filled, empty, out_a, lse_a),
        ):
            assert torch.equal(merged[0], out_a) and torch.equal(merged[1], lse_a)
        both = flashattn_ext.merge_states(filled, empty, filled, empty)
        assert not both[0].count_nonzero() and (both[1] == -INFINITY).all()


def test_gradients_with_empty_parts(device):  # N7, N8
    out_a, lse_a, out_b, lse_b = states(device)
    lse_a[0], lse_b[:, 1] = -INFINITY, -INFINITY
    leaves = [part.requires_grad_() for part in (out_a, lse_a, out_b, lse_b)]
    out, lse = flashattn_ext.merge_states(*leaves)
    seen = torch.isfinite(lse)
    gradients = torch.autograd.grad(
        [out, lse[seen]], leaves, [torch.ones_like(out), torch.ones_like(lse[seen])]
    )
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[1][0].count_nonzero() and not gradients[3][:, 1].count_nonzero()


@pytest.mark.parametrize("distance", [80.0, 1000.0, 1e30])
def test_far_apart(distance, device):  # N9
    out_a, lse_a, out_b, _ = states(device)
    for sign in (1, -1):
        lse_b = lse_a + sign * distance
        out, lse = flashattn_ext.merge_states(out_a, lse_a, out_b, lse_b)
        assert torch.equal(lse, torch.maximum(lse_a, lse_b))
        assert torch.allclose(out, out_b if sign > 0 else out_a)
        assert torch.isfinite(out).all()


def test_level_far_from_zero(device):  # N10: neither exp(lse) nor exp(-lse)
    out_a, lse_a, out_b, lse_b = states(device, "fp64", spread=1.0)
    near = flashattn_ext.merge_states(out_a, lse_a, out_b, lse_b)
    for level in (-3000.0, 3000.0):
        far = flashattn_ext.merge_states(out_a, lse_a + level, out_b, lse_b + level)
        assert torch.allclose(far[0], near[0], atol=1e-10)
        assert torch.allclose(far[1], near[1] + level)


def test_packed_states(device):
    """Packed: out (total, heads, head_dim) with lse (heads, total)."""
    out_a, lse_a, out_b, lse_b = states(device, shape=(3, 17))  # as (heads, total)
    packed = [out_a.transpose(0, 1), lse_a, out_b.transpose(0, 1), lse_b]
    out, lse = flashattn_ext.merge_states(*packed)
    exact = formula.merge_states(*(part.cpu() for part in (out_a, lse_a, out_b, lse_b)))
    assert out.shape == (17, 3, 8) and lse.shape == (3, 17)
    assert_close("out", out.transpose(0, 1), exact[0], None, torch.float32)
    assert_close("lse", lse, exact[1], None, torch.float32)


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_empty_states(shape, device):
    out, lse = flashattn_ext.merge_states(*states(device, shape=shape))
    assert out.shape == (*shape, 8) and lse.shape == shape


def test_a_ring_of_key_blocks_trains(device):
    """Through merged blocks, as in ring attention, forward and backward are those of one call."""
    tensors, _ = build(Problem(dtype="fp64", heads_q=4, len_q=30, len_k=30), device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    whole = flashattn_ext.flash_attention(*leaves, causal=True)
    state = None
    for begin in (0, 10, 20):
        rows = torch.arange(30, device=device).unsqueeze(1)
        mask = torch.arange(begin, begin + 10, device=device) <= rows
        part = flashattn_ext.flash_attention(
            leaves[0], leaves[1][:, :, begin : begin + 10], leaves[2][:, :, begin : begin + 10],
            attn_mask=mask, return_lse=True,
        )  # fmt: skip
        state = part if state is None else flashattn_ext.merge_states(*state, *part)
    grad_out = torch.randn_like(whole)
    assert torch.allclose(state[0], whole, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(whole, leaves, grad_out),
        torch.autograd.grad(state[0], leaves, grad_out),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-12)


def test_nan_is_not_hidden(device):
    out_a, lse_a, out_b, lse_b = states(device)
    lse_a[0, 0, 0], lse_b[0, 0, 0] = NAN, -INFINITY
    out, lse = flashattn_ext.merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.isnan(out).sum() == out.size(-1) and torch.isnan(out[0, 0, 0]).all()
    assert torch.isnan(lse).sum() == 1


def test_the_op_is_the_function(device):
    parts = [part.requires_grad_() for part in states(device)]
    results = [
        merge(*parts)
        for merge in (flashattn_ext.merge_states, torch.ops.flashattn_ext.merge_states)
    ]
    assert all(map(torch.equal, *results))
    gradients = [torch.autograd.grad(out.sum() + lse.sum(), parts) for out, lse in results]
    assert all(map(torch.equal, *gradients))
