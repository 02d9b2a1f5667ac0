"""Softmax and its logarithm: equal to torch's on every input, with one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext._autograd import (
    DifferentiableOp,
    Function,
    call_below_autograd,
    differentiate_by_formula,
)
from flashattn_ext._registration import error, raw_op, register_autocast, register_fake
from flashattn_ext._vmap import register_vmap


def softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax along `dim`: `exp(x - max(x)) / sum(exp(x - max(x)))`.

    Args:
        input: floating tensor of any shape and any strides.
        dim: the dimension to normalise over.
        dtype: input is converted to it first; the result has it. Default: the dtype of input.

    Returns:
        Contiguous tensor of input's shape, equal to `torch.softmax(input, dim, dtype)` to rounding.
        A row of `-inf` gives NaN, as in torch. Accumulated in fp32 (fp64 for fp64).

    Raises:
        RuntimeError: a dtype that is no floating dtype.
        IndexError: a `dim` that input does not have.

    Gradients: of `input`, to any order; forward-mode too. Method: the online normaliser of Milakov
    and Gimelshein, arXiv:1805.02867, where a row is too long to be kept.
    """
    return _softmax(_floating(input), _dim_of(input, dim), dtype=dtype)


def log_softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of :func:`softmax`, without forming it; arguments and errors as there."""
    return _log_softmax(_floating(input), _dim_of(input, dim), dtype=dtype)


def _floating(input: Tensor) -> Tensor:
    if not isinstance(input, Tensor):
        raise error("input", "a Tensor", type(input).__name__, TypeError)
    return input


def _dim_of(input: Tensor, dim: int) -> int:
    rank = max(input.dim(), 1)
    if not -rank <= dim < rank:
        raise error("dim", f"in [{-rank}, {rank - 1}]", dim, IndexError)
    return dim


def _softmax_gradient(grad_output, output, dim, input_dtype):
    grad_output, output = _wide(grad_output), _wide(output)
    products = grad_output * output
    return (products - output * products.sum(dim, keepdim=True)).to(input_dtype)


def _log_softmax_gradient(grad_output, output, dim, input_dtype):
    grad_output, output = _wide(grad_output), _wide(output)
    return (grad_output - output.exp() * grad_output.sum(dim, keepdim=True)).to(input_dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _register(name: str, torch_function, gradient) -> DifferentiableOp:
    forward_op, backward_op = raw_op(name), raw_op(f"{name}_backward")
    backward = differentiate_by_formula(backward_op, gradient)

    class SoftmaxFunction(Function):
        @staticmethod
        def forward(ctx, input, dim=-1, dtype=None):
            output = call_below_autograd(forward_op, input, dim, dtype=dtype)
            ctx.dim, ctx.input_dtype = dim, input.dtype
            ctx.save_for_backward(output)
            return output

        @staticmethod
        def backward(ctx, grad_output):
            (output,) = ctx.saved_tensors
            return backward(grad_output, output, ctx.dim, ctx.input_dtype), None, None

    SoftmaxFunction.__name__ = name

    def formula(input, dim, dtype=None):
        return torch_function(input, dim, dtype=dtype)

    def fake_forward(input, dim=-1, *, dtype=None):
        if not (dtype or input.dtype).is_floating_point:
            raise error("input", "a floating dtype", input.dtype, RuntimeError)
        _dim_of(input, dim)
        return input.new_empty(input.shape, dtype=dtype)

    def fake_backward(grad_output, output, dim, input_dtype):
        return output.new_empty(output.shape, dtype=input_dtype)

    def cast(autocast_dtype, args, kwargs):
        # torch's rule: fp32 on CUDA (unless a dtype is asked for), nothing on the CPU.
        if args[0].is_cuda and kwargs.get("dtype") is None and args[0].dtype != torch.float64:
            kwargs = {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def over_mapped(op, tensors):
        def rule(size, dims, args, kwargs):
            rank = args[0].dim() - (dims[0] is not None)
            mapped = [
                (tensor.expand(size, *tensor.shape) if at is None else tensor.movedim(at, 0))
                for tensor, at in zip(args[:tensors], dims[:tensors], strict=True)
            ]
            dim, others = args[tensors], args[tensors + 1 :]
            if rank == 0:
                return op(*(m.unsqueeze(1) for m in mapped), 1, *others, **kwargs).squeeze(1), 0
            return op(*mapped, dim % rank + 1, *others, **kwargs), 0

        return rule

    register_fake(forward_op, fake_forward)
    register_fake(backward_op, fake_backward)
    register_autocast(forward_op, cast)
    register_vmap(forward_op, over_mapped(forward_op, tensors=1))
    register_vmap(backward_op, over_mapped(backward_op, tensors=2))
    return DifferentiableOp(forward_op, SoftmaxFunction, formula)


_softmax = _register("softmax", torch.softmax, _softmax_gradient)
_log_softmax = _register("log_softmax", torch.log_softmax, _log_softmax_gradient)
