"""Gradients for ops whose kernels know nothing of autograd.

Each raw op gets one kernel at the dispatcher's Autograd key, so that `torch.ops.flashattn_ext.*` is
differentiable however it is called:

* an input carries a forward-mode tangent: the unfused formula runs in the op's place;
* an input requires grad: a `torch.autograd.Function` runs the op and keeps what backward needs;
* otherwise: the op, with nothing kept.

Transforms of `torch.func` pass through the same kernel, once for each level.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as functorch_is_active
from torch._C import _AutoDispatchBelowAutograd as below_autograd
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from flashattn_ext._registration import library, positional_arguments, positional_defaults

# The base of torch.autograd.Function: its `apply` stays at the level of torch.func that it is
# called at, where Function's starts over from the outermost, and it binds no defaults.
Function = torch.autograd.function._SingleLevelFunction


class DifferentiableOp:
    """A raw op with its gradient rules; calling it is calling the op, at the lowest cost.

    function: the autograd function for its first derivative.
    formula: the same result by differentiable torch ops; same arguments as the op.
    """

    def __init__(self, op: torch._ops.OpOverload, function: type[Function], formula: Callable):
        self.op = op
        self.function = function
        self.formula = formula
        self.defaults = positional_defaults(op)
        # Tensors are among the first arguments, and those that must be given the very first.
        arguments = positional_arguments(op)
        self.tensors = 1 + max(i for i, a in enumerate(arguments) if "Tensor" in str(a.type))
        self.required = sum(not a.has_default_value() for a in arguments)
        self.no_tensors = self.defaults[self.required : self.tensors]
        self.usual = self.defaults[self.tensors :]
        library.impl(op.name().split("::")[1], self.autograd_kernel, "Autograd")

    def __call__(self, *args, **kwargs):
        # Where the dispatcher would go straight to the Autograd key, its way there is saved.
        if (
            torch.compiler.is_compiling()
            or functorch_is_active()
            or torch._C._is_any_autocast_enabled()
            or has_torch_function(args)
        ):
            return self.op(*args, **kwargs)
        return self.run(args, kwargs)

    def autograd_kernel(self, *args, **kwargs):
        """What the dispatcher calls."""
        return self.run(args, kwargs)

    def run(self, args: tuple, kwargs: dict):
        if forward_ad._current_level >= 0 and any(map(has_tangent, args)):
            return self.formula(*args, *self.defaults[len(args) :], **kwargs)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args[: self.tensors]):
            args = (*args, *self.defaults[len(args) :], *kwargs.values())
            return apply(self.function, *args)
        args = self.without_defaults(args)
        with below_autograd():
            return self.op(*args, **kwargs)

    def without_defaults(self, args: tuple) -> tuple:
        """Less to read for the dispatcher, which fills them in faster."""
        if not self.usual or args[self.tensors :] != self.usual:
            return args
        none_given = all(map(is_, args[self.required : self.tensors], self.no_tensors))
        return args[: self.required if none_given else self.tensors]


def has_tangent(value) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def apply(function: type[Function], *args):
    if not functorch_is_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def call_below_autograd(op: torch._ops.OpOverload, *args, **kwargs):
    """Runs the op from inside `Function.forward`."""
    if not functorch_is_active():
        with below_autograd():
            return op(*args, **kwargs)
    # Function.forward has switched recording off, but outer levels must still record.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below_autograd():
        return op(*args, **kwargs)


def differentiate_by_formula(op: torch._ops.OpOverload, formula: Callable) -> DifferentiableOp:
    """Makes a backward op differentiable: its own gradient is that of the formula.

    The op runs as it is; only when its result is differentiated is the formula evaluated, on the
    tensors the op was given, and differentiated by torch (to any order).
    """

    class DifferentiatedByFormula(Function):
        @staticmethod
        def forward(ctx, *args):
            results = call_below_autograd(op, *args)
            ctx.set_materialize_grads(False)
            ctx.tensor_at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
            ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
            ctx.save_for_backward(*[args[i] for i in ctx.tensor_at])
            return results

        @staticmethod
        def backward(ctx, *grads):
            args = list(ctx.others)
            for i, tensor in zip(ctx.tensor_at, ctx.saved_tensors, strict=True):
                args[i] = tensor
            wanted = [i for i in ctx.tensor_at if ctx.needs_input_grad[i]]

            def differentiated(*tensors):
                for i, tensor in zip(wanted, tensors, strict=True):
                    args[i] = tensor
                results = formula(*args)
                results = results if isinstance(results, tuple) else (results,)
                return tuple(r for r, grad in zip(results, grads, strict=True) if grad is not None)

            answer: list[Tensor | None] = [None] * len(args)
            upstream = tuple(grad for grad in grads if grad is not None)
            if upstream and wanted:
                # Not torch.autograd.grad: it misses tensors of a torch.func level that has ended.
                _, pull_back = torch.func.vjp(differentiated, *[args[i] for i in wanted])
                for i, grad in zip(wanted, pull_back(upstream), strict=True):
                    answer[i] = grad
            return tuple(answer)

    DifferentiatedByFormula.__name__ = f"{op.name().split('::')[1]}_by_formula"
    return DifferentiableOp(op, DifferentiatedByFormula, formula)
