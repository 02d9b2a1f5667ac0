"""The one tolerance table. No test widens it.

A result may differ from the exact (fp64) formula by at most twice what the same formula differs by
when torch runs it eagerly in the dtype of the inputs, plus 1e-5. lse and max logits are kept in the
accumulator's dtype, so there "eagerly" means in that dtype. A few roundings of the accumulator are
allowed on top, for large numbers. On CUDA, 16-bit probabilities and score gradients are operands of
tensor cores, that is rounded once before they are summed up: one rounding of the dtype on top.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    eager_errors: float  # how many times the error of the eager formula
    absolute: float
    roundings: int  # of the accumulator, at the magnitude of what was summed up


TABLE = {
    torch.float16: Tolerance(eager_errors=2, absolute=1e-5, roundings=4),
    torch.bfloat16: Tolerance(eager_errors=2, absolute=1e-5, roundings=4),
    torch.float32: Tolerance(eager_errors=2, absolute=1e-5, roundings=4),
    torch.float64: Tolerance(eager_errors=2, absolute=1e-12, roundings=64),
}


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(tensor):
    return torch.where(torch.isfinite(tensor), tensor, 0.0)


def max_error(got, exact):
    """The largest difference between two finite tensors; 0 for empty ones."""
    difference = (got.double() - exact.double()).abs()
    return difference.max().item() if difference.numel() else 0.0


def allowed_error(dtype, eager_error, magnitude, tensor_cores=False):
    rule = TABLE[dtype]
    rounding = torch.finfo(accumulator(dtype)).eps * magnitude
    operand = torch.finfo(dtype).eps / 2 * magnitude if tensor_cores else 0.0
    return rule.eager_errors * eager_error + rule.absolute + rule.roundings * rounding + operand


def assert_close(name, got, exact, eager, dtype, second_look=None):
    """Holds one result against the table; NaN and infinities must be where the exact ones are.

    Without an eager run, `eager=None`, the exact result rounded to the dtype of `got` stands for
    it. `second_look()`, asked only after a failure, gives the two measures more carefully: the
    eager error over several draws, since that of a result of few numbers may be 0 by luck; and, of
    a gradient, the sum of the magnitudes of the terms that an element is the sum of, since no
    accumulator does better than a rounding of that, however much of it cancels.
    """
    if eager is None:
        eager = exact.to(got.dtype)
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    tensor_cores = got.is_cuda and got.dtype == dtype and got.element_size() == 2
    got, exact, eager = (t.detach().double().cpu() for t in (got, exact, eager))
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (test(got) != test(exact)).nonzero()
        assert not len(wrong), f"{name}: {kind} differs at {len(wrong)} places, {wrong[0].tolist()}"
    got, exact, eager = finite(got), finite(exact), finite(eager)
    error, eager_error = max_error(got, exact), max_error(eager, exact)
    largest = max_error(exact, torch.zeros(()))
    limit = allowed_error(dtype, eager_error, largest, tensor_cores)
    if not error <= limit and second_look is not None:
        larger, magnitude = second_look()
        limit = allowed_error(dtype, max(eager_error, larger), magnitude, tensor_cores)
    if not error <= limit:
        place = (got - exact).abs().flatten().argmax().item()
        raise AssertionError(
            f"{name}: error {error:.3g} > {limit:.3g} at flat index {place}: "
            f"{got.flatten()[place].item()!r}, exact {exact.flatten()[place].item()!r}"
        )
