"""One softmax problem, and who computes it: ours, torch's, and a device copy as the bound."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

import flashattn_ext  # noqa: F401  (registers the ops)
from benchmarks.attention import DTYPES
from benchmarks.check import relative_error
from benchmarks.counts import BYTES
from benchmarks.peers import SkippedError
from flashattn_ext._registration import devices_with_kernel

READ_TWICE = 2**26  # rows that no GPU can hold on the chip are read twice; their bytes count that
CHECKED = 2**20  # elements that are held against the formula


@dataclasses.dataclass(frozen=True)
class Softmax:
    """softmax of a tensor of `shape` over `dim`; backward is the gradient of its input."""

    suite: str
    direction: str
    dtype: str
    sizes: tuple[int, ...]
    dim: int
    op: str = "softmax"

    @property
    def length(self) -> int:
        return self.sizes[self.dim]

    @property
    def shape(self) -> str:
        return " x ".join(map(str, self.sizes))

    @property
    def options(self) -> str:
        return f"dim {self.dim} of {len(self.sizes)}"

    @property
    def label(self) -> str:
        return f"{self.direction:8} {self.dtype} {self.shape:<24} {self.options}"

    @property
    def moved(self) -> int:
        """Tensors read or written: input and output; two inputs and a gradient."""
        tensors = 2 if self.direction == "forward" else 3
        return 2 * tensors - 1 if self.length >= READ_TWICE else tensors

    def columns(self) -> dict:
        return {"shape": self.shape, "options": self.options, "len_k": self.length}

    def counts(self, _tensors) -> tuple[float, float]:
        return 0.0, float(self.moved * math.prod(self.sizes) * BYTES[self.dtype])


@dataclasses.dataclass(frozen=True)
class SoftmaxTensors:
    source: Tensor
    target: Tensor
    output: Tensor | None  # softmax of another input, for backward


def make_softmax_tensors(case: Softmax, device: str) -> SoftmaxTensors:
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPES[case.dtype]
    source = torch.randn(case.sizes, device=device, dtype=dtype, generator=generator)
    output = None
    if case.direction == "backward":
        output = torch.randn(case.sizes, device=device, dtype=dtype, generator=generator)
        output = torch.softmax(output, case.dim)
    return SoftmaxTensors(source, torch.empty_like(source), output)


def softmax_call(name: str, case: Softmax, t: SoftmaxTensors):
    if name == "copy":
        return lambda: t.target.copy_(t.source)
    device, dtype = t.source.device.type, t.source.dtype
    ops = torch.ops.flashattn_ext
    op = "softmax" if case.direction == "forward" else "softmax_backward"
    if name == "ours" and device not in devices_with_kernel(op):
        raise SkippedError(f"{op} has no kernel for {device}")
    if case.direction == "forward":
        function = ops.softmax.default if name == "ours" else torch.softmax
        return lambda: function(t.source, case.dim)
    if name == "ours":
        return lambda: ops.softmax_backward.default(t.source, t.output, case.dim, dtype)
    return lambda: torch._softmax_backward_data(t.source, t.output, case.dim, dtype)


def softmax_error(case: Softmax, t: SoftmaxTensors, got: Tensor) -> tuple[float, float]:
    """Error against the formula in fp64, on as many leading indices of another dim as are cheap;
    and what rounding the exact result costs (fp16 has few digits for shares of long rows)."""
    other = max((d for d in range(len(case.sizes)) if d != case.dim), key=case.sizes.__getitem__)
    rows = max(1, CHECKED * case.sizes[other] // math.prod(case.sizes))
    part = [x.narrow(other, 0, min(rows, x.size(other))) for x in (t.source, got)]
    source, got = part[0].double(), part[1]
    if case.direction == "forward":
        exact = torch.softmax(source, case.dim)
    else:
        output = t.output.narrow(other, 0, got.size(other)).double()
        exact = output * (source - (source * output).sum(case.dim, keepdim=True))
    return relative_error(got, exact), relative_error(exact.to(got.dtype), exact)
