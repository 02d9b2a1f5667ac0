"""Which kernel a call runs, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor
from torch.autograd import forward_ad

from flashattn_ext._autograd import has_tangent
from flashattn_ext._library import instruction_set
from flashattn_ext._registration import devices_with_kernel, error
from flashattn_ext.sdpa import is_causal_bias, reason_for_torch

_RAW_OPS = {
    "flash_attention": "flash_attention",
    "flash_attention_varlen": "flash_attention_varlen",
    "naive_attention": "naive_attention",
    "scaled_dot_product_attention": "flash_attention",
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found.

    kernel: what runs: "<device>: <what it is>", "formula", "torch" or "none" (the call is an
    error).
    reason: why that, and why nothing faster.
    """

    function: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.function} runs [{self.kernel}] because {self.reason}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args,
    function: str | Callable = "flash_attention",
    **options,
) -> Explanation:
    """Says which kernel a call with these arguments would run, without running it.

    Args:
        query, key, value, args, options: as they would be passed to the function.
        function: "flash_attention", "flash_attention_varlen", "naive_attention" or
            "scaled_dot_product_attention", or the function itself.

    Returns:
        An :class:`Explanation`; `print` it.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", str(function))
    if name not in _RAW_OPS:
        raise error("function", f"one of {', '.join(_RAW_OPS)}", name)
    if name == "scaled_dot_product_attention":
        attn_mask = args[0] if args else options.get("attn_mask")
        if attn_mask is not None and is_causal_bias(attn_mask):
            attn_mask = None  # a rule, not a tensor to read
        reason = reason_for_torch(query, key, value, attn_mask)
        if reason:
            return Explanation(name, "torch", reason)
    tensors = (query, key, value, *args, *options.values())
    if forward_ad._current_level >= 0 and any(map(has_tangent, tensors)):
        reason = "an argument carries a forward-mode tangent, which only the unfused formula has"
        return Explanation(name, "formula", reason)
    device_type = query.device.type
    if device_type == "meta":
        return Explanation(name, "meta: shapes only", "query has no storage")
    if device_type not in devices_with_kernel(f"{_RAW_OPS[name]}_forward"):
        return Explanation(name, "none", f"this build has no kernel for device {device_type}")
    return Explanation(name, *_choice(name, device_type))


def _choice(name: str, device_type: str) -> tuple[str, str]:
    if name == "naive_attention":
        kernel = f"{device_type}: three materialised steps"
        return kernel, "naive_attention was asked for; flash_attention needs linear memory only"
    kernel = f"{device_type}: tiled, linear memory"
    reason = f"it is the one kernel for {device_type}, and takes every option"
    if device_type == "cpu":
        reason += f"; its instruction set is {instruction_set()}"
    return kernel, reason
