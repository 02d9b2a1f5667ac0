"""The formula in PyTorch, held against the independent one of the tests, and its gradients."""

from __future__ import annotations

import formula
import pytest
import torch
from calls import DENSE, PACKED, attention_inputs, random_tensor

from flashattn_ext import reference

GRADIENTS = ("attn_mask", "alibi_slopes", "sinks")


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def leaves(tensors, options):
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    options = {
        name: value.detach().clone().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in options.items()
    }
    return tensors, options


@pytest.mark.parametrize("option", DENSE)
def test_attention(option):
    tensors = attention_inputs()
    got = reference.attention(*tensors, **DENSE[option])
    expected = formula.attention(*tensors, **DENSE[option])
    close(got.out, expected.out)
    close(got.lse, expected.lse)
    close(got.max_logits.double(), expected.max_logits.float().double())
    close(got.weights, expected.weights)


@pytest.mark.parametrize("option", DENSE)
def test_attention_backward(option):
    tensors, options = leaves(attention_inputs(), DENSE[option])
    result = reference.attention(*tensors, **options)
    grad_out, grad_weights = random_tensor(*result.out.shape), random_tensor(*result.weights.shape)
    empty = torch.isinf(result.lse)
    grad_lse = random_tensor(*result.lse.shape).masked_fill(empty, 0)
    names = [name for name in GRADIENTS if getattr(options.get(name), "requires_grad", False)]
    inputs = [*tensors, *[options[name] for name in names]]
    outputs = (result.out, result.lse, result.weights)
    expected = torch.autograd.grad(outputs, inputs, (grad_out, grad_lse, grad_weights))
    got = reference.attention_backward(
        grad_out, grad_lse, *tensors, grad_weights=grad_weights, **options
    )
    for a, b in zip([*got[:3], *[getattr(got, name) for name in names]], expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("option", PACKED)
def test_attention_varlen(option):
    tensors = (random_tensor(8, 4, 3), random_tensor(9, 2, 3), random_tensor(9, 2, 4))
    offsets = (torch.tensor([0, 3, 3, 7]), torch.tensor([0, 2, 5, 8]))
    tensors, options = leaves(tensors, PACKED[option])
    got = reference.attention_varlen(*tensors, *offsets, 4, 3, **options)
    expected = formula.packed_attention(
        *tensors, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], **options
    )
    close(got.out, expected.out)
    close(got.lse, expected.lse)
    close(got.max_logits.double(), expected.max_logits.float().double())

    grad_out = random_tensor(*got.out.shape)
    grad_lse = random_tensor(*got.lse.shape).masked_fill(torch.isinf(got.lse), 0)
    names = [name for name in GRADIENTS if name in options]
    inputs = [*tensors, *[options[name] for name in names]]
    by_autograd = torch.autograd.grad((got.out, got.lse), inputs, (grad_out, grad_lse))
    written_out = reference.attention_varlen_backward(
        grad_out, grad_lse, *tensors, *offsets, 4, 3, **options
    )
    written_out = [*written_out[:3], *[getattr(written_out, name) for name in names]]
    for a, b in zip(written_out, by_autograd, strict=True):
        close(a, b)


@pytest.mark.parametrize(
    "sizes",
    [{"len_k": 0}, {"len_q": 0}, {"batch": 0}, {"heads_q": 0, "heads_kv": 0}, {"head_dim": 0}],
    ids=str,
)
def test_sizes_of_zero(sizes):
    tensors, options = leaves(attention_inputs(**sizes), {"sinks": random_tensor(4)})
    if sizes.get("heads_q") == 0:
        options = {}
    result = reference.attention(*tensors, **options)
    assert result.out.count_nonzero() == 0
    assert torch.isinf(result.max_logits).all()
    result.out.sum().backward()
    for tensor in tensors:
        assert tensor.grad.count_nonzero() == 0


def test_storage_past_key_lengths_is_not_even_multiplied_by_zero():
    tensors, _ = leaves(attention_inputs(), {})
    lengths = torch.tensor([0, 4])
    clean = reference.attention(*tensors, key_lengths=lengths).out
    with torch.no_grad():
        for tensor in tensors[1:]:
            tensor[0] = torch.nan
            tensor[1, :, 4:] = torch.inf
    dirty = reference.attention(*tensors, key_lengths=lengths).out
    assert torch.equal(clean, dirty)
    dirty.sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    tensors = attention_inputs(dtype)
    result = reference.attention(*tensors)
    assert result.out.dtype == dtype and result.weights.dtype == dtype
    assert result.lse.dtype == torch.float32
    assert reference.attention(*tensors, dtype=torch.float64).out.dtype == torch.float64


def test_autocast_does_not_reach_the_formula():
    tensors = attention_inputs(torch.float32)
    expected = reference.attention(*tensors).out
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reference.attention(*tensors).out, expected)
