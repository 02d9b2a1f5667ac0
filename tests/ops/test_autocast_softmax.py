"""Autocast of softmax: as torch's."""

from __future__ import annotations

import pytest
import torch
from calls import random_tensor

import flashattn_ext

OPS = ("softmax", "log_softmax")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [None, torch.float16, torch.float64])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_follows_torch(name, source, asked, dtype, device):
    x = random_tensor(3, 4).to(device, source).requires_grad_()
    with torch.autocast(device, dtype):
        ours = getattr(flashattn_ext, name)(x, -1, dtype=asked)
        theirs = getattr(torch, name)(x, -1, dtype=asked)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    ours.sum().backward()
    assert x.grad.dtype == source
