"""How the raw backward ops return gradients, for their formulas and their fake kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from flashattn_ext.layout import absent, empty_in_order_of


def wanted_gradients(
    gradients: Iterable[Tensor | None], inputs: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients with absent tensors in place of those that nobody asked for."""
    return tuple(
        gradient if asked and gradient is not None else absent(inputs[0] if x is None else x)
        for gradient, x, asked in zip(gradients, inputs, wanted, strict=True)
    )


def fake_gradients(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Uninitialised gradients. The first three inputs are query, key and value."""

    def gradient(i, x):
        return empty_in_order_of(x) if i < 3 else x.new_empty(x.shape)

    return wanted_gradients(
        (
            gradient(i, x) if asked and x is not None and x.is_floating_point() else None
            for i, (x, asked) in enumerate(zip(inputs, wanted, strict=True))
        ),
        inputs,
        wanted,
    )
