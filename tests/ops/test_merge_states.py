"""Joining partial attention: equal to attention over all keys, right for empty states."""

from __future__ import annotations

import pytest
import torch
from calls import attention_inputs, random_tensor

import flashattn_ext
from flashattn_ext import merge_states

FUNCTIONS = [merge_states, torch.ops.flashattn_ext.merge_states]


@pytest.fixture(params=FUNCTIONS, ids=["function", "op"])
def merge(request):
    return request.param


def over(tensors, keys, **options):
    query, key, value = tensors
    return flashattn_ext.flash_attention(
        query, key[:, :, keys], value[:, :, keys], return_lse=True, **options
    )


@pytest.mark.parametrize("at", [0, 1, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_parts_of_the_keys(dtype, at, merge, device):
    tensors = [t.to(device).requires_grad_() for t in attention_inputs(dtype, len_k=9)]
    whole = over(tensors, slice(None))
    merged = merge(*over(tensors, slice(0, at)), *over(tensors, slice(at, None)))
    upstream = [torch.ones_like(result) for result in whole]
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b)
    expected = torch.autograd.grad(whole, tensors, upstream)
    for a, b in zip(torch.autograd.grad(merged, tensors, upstream), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_packed(merge, device):
    query, key, value = (torch.randn(6, n, 8, device=device) for n in (4, 2, 2))
    offsets = torch.tensor([0, 2, 6], device=device)

    def attend(key, value):
        return flashattn_ext.flash_attention_varlen(
            query, key, value, offsets, offsets, 4, 4, return_lse=True
        )

    parts = attend(key, value), attend(key + 1, value)
    out, lse = merge(*parts[0], *parts[1])
    dense = [(part.transpose(0, 1)[None], row[None]) for part, row in parts]
    out_dense, lse_dense = merge(*dense[0], *dense[1])
    torch.testing.assert_close(out, out_dense[0].transpose(0, 1))
    torch.testing.assert_close(lse, lse_dense[0])


def state(*lse, fill=1.0, requires_grad=True):
    """One row for each lse, with out = fill."""
    lse = torch.tensor(lse, dtype=torch.float64).reshape(1, 1, -1)
    out = torch.full((*lse.shape, 2), fill, dtype=torch.float64)
    return out.requires_grad_(requires_grad), lse.requires_grad_(requires_grad)


@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_an_empty_state_changes_nothing(garbage, merge):  # N8
    full, empty = state(0.3, -700.0, 5.0), state(*[float("-inf")] * 3, fill=garbage)
    for a, b in ((full, empty), (empty, full)):
        out, lse = merge(*a, *b)
        assert torch.equal(out, full[0]) and torch.equal(lse, full[1])
        inputs = (*full, *empty)
        gradients = torch.autograd.grad(out.sum() + lse.sum(), inputs)
        for gradient, expected in zip(gradients, (1.0, 1.0, 0.0, 0.0), strict=True):
            assert torch.equal(gradient, torch.full_like(gradient, expected))


def test_two_empty_states(merge):  # N8
    a, b = state(float("-inf"), fill=0.0), state(float("-inf"), fill=0.0)
    out, lse = merge(*a, *b)
    assert out.count_nonzero() == 0 and lse.item() == float("-inf")
    for gradient in torch.autograd.grad(out.sum(), (*a, *b)):
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("far", [100.0, 1e4, 1e30])
def test_far_apart(far, merge):  # N9
    a, b = state(-far, 0.0, far), state(0.0, far, -far, fill=3.0)
    out, lse = merge(*a, *b)
    assert torch.equal(out[0, 0, :, 0], torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64))
    assert torch.equal(lse[0, 0], torch.tensor([0.0, far, far], dtype=torch.float64))
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), (*a, *b)):
        assert torch.isfinite(gradient).all()


def test_nan_is_not_hidden(merge):
    a, b = state(float("nan"), 0.0), state(0.0, float("-inf"))
    out, lse = merge(*a, *b)
    assert torch.isnan(out[0, 0, 0]).all() and torch.isnan(lse[0, 0, 0])
    assert torch.isfinite(out[0, 0, 1]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, merge, device):
    tensors = [t.to(device) for t in attention_inputs(dtype)]
    parts = [*over(tensors, slice(0, 2)), *over(tensors, slice(2, None))]
    out, lse = merge(*parts)
    assert out.dtype == dtype and lse.dtype == torch.float32
    exact, _ = merge(*[part.double() for part in parts])
    torch.testing.assert_close(out, exact.to(dtype))  # one rounding, at the end


def test_order_does_not_matter(merge):
    parts = [(random_tensor(2, 3, 4, 5, seed=i), random_tensor(2, 3, 4, seed=-i)) for i in range(3)]
    left = merge(*merge(*parts[0], *parts[1]), *parts[2])
    right = merge(*parts[0], *merge(*parts[1], *parts[2]))
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b)


BAD = {
    "out_a": ((3, 4), (3,), (3, 4), (3,)),
    "out_b": ((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5), (1, 2, 3)),
    "lse_a": ((1, 2, 3, 4), (1, 3, 2), (1, 2, 3, 4), (1, 2, 3)),
    "lse_b": ((6, 2, 4), (2, 6), (6, 2, 4), (6, 2)),
}


@pytest.mark.parametrize("name", BAD)
def test_argument_errors(name, merge):
    tensors = [torch.zeros(shape) for shape in BAD[name]]
    with pytest.raises(ValueError, match=f"flashattn_ext: {name}: expected .*, but got \\("):
        merge(*tensors)
