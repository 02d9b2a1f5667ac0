"""What every op's Python file registers through: the library, defaults, autocast, public overloads.

The kernels and the schemas of the raw ops are in the C++ library; this one adds to it the rules that
PyTorch keeps in Python, and the public ops that are made of others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

NAMESPACE = "flashattn_ext"
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def raw_op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.flashattn_ext, name).default


def argument_names(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def positional_defaults(op: torch._ops.OpOverload) -> tuple:
    """The defaults of the positional arguments: the dispatcher leaves them out of calls to Python."""
    return tuple(a.default_value for a in op._schema.arguments if not a.kwarg_only)


def error(argument: str, expected: str, got, kind: type[Exception] = ValueError) -> Exception:
    """An argument error in the words of csrc/ops/checks.h."""
    return kind(f"flashattn_ext: {argument}: expected {expected}, but got {got}")


def register_fake(op: torch._ops.OpOverload, kernel: Callable) -> None:
    torch.library.register_fake(op.name(), kernel, lib=library)


def register_autocast(op: torch._ops.OpOverload, cast: Callable) -> None:
    """Under autocast, `cast(dtype, args, kwargs)` gives the arguments that the op then runs on."""
    defaults = positional_defaults(op)
    for device_type in ("CPU", "CUDA"):
        keys = DispatchKeySet(getattr(DispatchKey, f"Autocast{device_type}"))

        def kernel(*args, _keys=keys, _device_type=device_type.lower(), **kwargs):
            dtype = torch.get_autocast_dtype(_device_type)
            args, kwargs = cast(dtype, (*args, *defaults[len(args) :]), kwargs)
            with _ExcludeDispatchKeyGuard(_keys):
                return op(*args, **kwargs)

        library.impl(op.name().split("::")[1], kernel, f"Autocast{device_type}")


def define_public(
    name: str, function: Callable, arguments: str, overloads: dict[str, Sequence[str]], tags=()
) -> None:
    """Defines `torch.ops.flashattn_ext.<name>` as another name of a Python function.

    A schema has one fixed number of results, so each optional result makes an overload of its own:
    `overloads` maps an overload's name to the `return_...` arguments that it has, which must be true.
    """
    for overload, wanted in overloads.items():
        qualified = f"{name}.{overload}" if overload else name
        flags = "".join(f", bool {flag}" for flag in wanted)
        if flags and "*" not in arguments:
            flags = ", *" + flags
        results = "Tensor" if not wanted else f"({', '.join(['Tensor'] * (1 + len(wanted)))})"
        library.define(f"{qualified}({arguments}{flags}) -> {results}", tags=tags)
        library.impl(qualified, _checking_flags(function, wanted), "CompositeImplicitAutograd")


def _checking_flags(function: Callable, wanted: Sequence[str]) -> Callable:
    if not wanted:
        return function

    def kernel(*args, **kwargs):
        for flag in wanted:
            if not kwargs[flag]:
                raise error(flag, "True in this overload (leave it out instead)", "False")
        return function(*args, **kwargs)

    kernel.__signature__ = inspect.signature(function)
    return kernel
