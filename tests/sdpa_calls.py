"""What the tests of the drop-in share."""

from __future__ import annotations

import torch
from calls import random_tensor

torch_attention = torch._C._nn.scaled_dot_product_attention


def tensors(*shapes, dtype=torch.float64):
    return [random_tensor(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def calls_of(function, *args, **kwargs):
    """The attention ops that run, by name."""
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(word in str(func) for word in ("attention", "transformer_encoder")):
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Record():
        function(*args, **kwargs)
    return seen
