"""Autocast: attention in its dtype, gradients in the dtype of each input."""

from __future__ import annotations

import pytest
import torch
from calls import attention_inputs, random_tensor

import flashattn_ext

OPS = (
    "flash_attention_forward",
    "flash_attention_backward",
    "flash_attention_varlen_forward",
    "naive_attention_forward",
)
ops = torch.ops.flashattn_ext
FUNCTIONS = {
    "flash_attention": flashattn_ext.flash_attention,
    "naive_attention": flashattn_ext.naive_attention,
    "sdpa": lambda *args, **kwargs: flashattn_ext.scaled_dot_product_attention(
        *args, enable_gqa=True, **kwargs
    ),
    "op": ops.flash_attention,
    "raw op": lambda *args, **kwargs: ops.flash_attention_forward(*args, **kwargs)[0],
}
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=FUNCTIONS)
def attend(request):
    return FUNCTIONS[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def inputs(*dtypes):
    tensors = attention_inputs(torch.float32)
    return [t.to(kind).requires_grad_() for t, kind in zip(tensors, dtypes, strict=True)]


@pytest.mark.parametrize("mix", ["fp32", "low", "value low", "query low"])
def test_runs_in_the_autocast_dtype(mix, dtype, attend, device):  # T2
    """Also what comes out of a norm (fp32 under autocast) beside what does not."""
    mixes = {
        "fp32": (torch.float32,) * 3,
        "low": (dtype,) * 3,
        "value low": (torch.float32, torch.float32, dtype),
        "query low": (dtype, torch.float32, torch.float32),
    }
    tensors = [t.detach().to(device).requires_grad_() for t in inputs(*mixes[mix])]
    with torch.autocast(device, dtype):
        out = attend(*tensors)
    assert out.dtype == dtype
    assert torch.equal(out, attend(*[t.to(dtype) for t in tensors]))
    out.sum().backward()
    for tensor in tensors:
        assert tensor.grad.dtype == tensor.dtype
        assert tensor.grad.count_nonzero() > 0 or tensor is not tensors[2]


def test_mixed_dtypes_are_an_error_outside(attend, device):  # T3
    tensors = [t.to(device) for t in inputs(torch.float32, torch.float32, torch.bfloat16)]
    with pytest.raises(RuntimeError, match="value"):
        attend(*tensors)


def test_fp64_is_left_alone(attend, device):
    tensors = [t.to(device) for t in attention_inputs(torch.float64)]
    with torch.autocast(device, torch.bfloat16):
        assert attend(*tensors).dtype == torch.float64


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, torch.float16, torch.bool], ids=str
)
def test_masks(kind, dtype, attend, device):  # T4
    mask = random_tensor(3, 5).to(device)
    mask = mask > 0 if kind == torch.bool else mask.to(kind).requires_grad_()
    tensors = [t.to(device) for t in attention_inputs(torch.float32)]
    with torch.autocast(device, dtype):
        out = attend(*tensors, attn_mask=mask)
    assert out.dtype == dtype
    expected = mask if kind in (torch.bool, torch.float32) else mask.to(dtype)
    assert torch.equal(out, attend(*[t.to(dtype) for t in tensors], attn_mask=expected))
    if mask.requires_grad:
        out.sum().backward()
        assert mask.grad.dtype == kind and mask.grad.count_nonzero() > 0


def test_backward_inside_autocast(device):
    """The gradient is that of the forward call, wherever backward is called."""
    gradients = []
    for inside in (False, True):
        tensors = [t.to(device) for t in inputs(*[torch.float32] * 3)]
        tensors = [t.detach().requires_grad_() for t in tensors]
        with torch.autocast(device, torch.bfloat16):
            out = flashattn_ext.flash_attention(*tensors)
            if inside:
                out.sum().backward()
        if not inside:
            out.sum().backward()
        gradients.append([t.grad for t in tensors])
    assert all(map(torch.equal, *gradients))


def test_packed(dtype, device):
    tensors = [torch.randn(7, heads, 8, device=device, requires_grad=True) for heads in (4, 2, 2)]
    offsets = torch.tensor([0, 3, 7], device=device)
    with torch.autocast(device, dtype):
        out = flashattn_ext.flash_attention_varlen(*tensors, offsets, offsets, 4, 4)
    assert out.dtype == dtype
    out.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in tensors)


def test_lse_and_sinks_stay_exact(dtype, device):
    query, key, value = (t.to(device) for t in attention_inputs(torch.float32))
    sinks = torch.full((4,), 1.001, device=device, requires_grad=True)
    with torch.autocast(device, dtype):
        _, lse = flashattn_ext.flash_attention(query, key, value, sinks=sinks, return_lse=True)
    assert lse.dtype == torch.float32
    lse.sum().backward()
    assert sinks.grad.dtype == torch.float32


def test_compiled(dtype, device):
    torch._dynamo.reset()
    tensors = [t.to(device) for t in attention_inputs(torch.float32)]

    def attend(*tensors):
        with torch.autocast(device, dtype):
            return flashattn_ext.flash_attention(*tensors)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), attend(*tensors))
