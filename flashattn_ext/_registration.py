"""What every op's Python file registers through: the library, defaults, autocast, public overloads.

The kernels and the schemas of the raw ops are in the C++ library; this one adds to it the rules
that PyTorch keeps in Python, and the public ops that are made of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

from flashattn_ext._library import build_info

NAMESPACE = "flashattn_ext"
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def raw_op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.flashattn_ext, name).default


def devices_with_kernel(name: str) -> tuple[str, ...]:
    """The types of devices that this build has a kernel of the raw op for."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # A build without CUDA registers ops that only say so.
    keys = {"cpu": "CPU", "cuda": "CUDA"} if build_info().get("cuda") else {"cpu": "CPU"}
    return tuple(
        device_type for device_type, key in keys.items() if has_kernel(f"{NAMESPACE}::{name}", key)
    )


def argument_names(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def positional_arguments(op: torch._ops.OpOverload) -> list:
    return [argument for argument in op._schema.arguments if not argument.kwarg_only]


def positional_defaults(op: torch._ops.OpOverload) -> tuple:
    """The defaults of the positional arguments, which the dispatcher leaves out of calls."""
    return tuple(argument.default_value for argument in positional_arguments(op))


def error(argument: str, expected: str, got, kind: type[Exception] = ValueError) -> Exception:
    """An argument error in the words of csrc/ops/checks.h."""
    return kind(f"flashattn_ext: {argument}: expected {expected}, but got {got}")


def register_fake(op: torch._ops.OpOverload, kernel: Callable) -> None:
    torch.library.register_fake(op.name(), kernel, lib=library)


def register_autocast(op: torch._ops.OpOverload, cast: Callable) -> None:
    """Under autocast, `cast(dtype, args, kwargs)` gives the arguments that the op then runs on."""
    defaults = positional_defaults(op)

    def register(key: str, device_type: str) -> None:
        keys = DispatchKeySet(getattr(DispatchKey, key))

        def kernel(*args, **kwargs):
            dtype = torch.get_autocast_dtype(device_type)
            args, kwargs = cast(dtype, (*args, *defaults[len(args) :]), kwargs)
            with _ExcludeDispatchKeyGuard(keys):
                return op(*args, **kwargs)

        library.impl(op.name().split("::")[1], kernel, key)

    register("AutocastCPU", "cpu")
    register("AutocastCUDA", "cuda")


def define_public(name: str, function: Callable, arguments: str, results: str = "Tensor", tags=()):
    """Defines `torch.ops.flashattn_ext.<name>` as another name of a Python function."""
    library.define(f"{name}({arguments}) -> {results}", tags=tags)
    for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
        library.impl(name, function, key)


def define_public_with_results(
    name: str, function: Callable, arguments: str, optional_results: Sequence[str]
) -> None:
    """The same for a function whose `return_...` arguments add results.

    A schema has one fixed number of results, so every choice of them is an overload of its own; the
    overload of `return_lse` has that argument, and demands that it is true.
    """
    for count in range(len(optional_results) + 1):
        for chosen in itertools.combinations(optional_results, count):
            flags = "".join(f", bool {flag}" for flag in chosen)
            results = f"({', '.join(['Tensor'] * (count + 1))})" if chosen else "Tensor"
            overload = "_and_".join(flag.removeprefix("return_") for flag in chosen)
            define_public(
                f"{name}.{overload}" if overload else name,
                _with_true_flags(function, chosen),
                arguments + flags,
                results,
            )


def _with_true_flags(function: Callable, flags: Sequence[str]) -> Callable:
    if not flags:
        return function

    def kernel(*args, **kwargs):
        for flag in flags:
            if not kwargs[flag]:
                raise error(flag, "True (leave it out instead)", "False")
        return function(*args, **kwargs)

    return kernel
