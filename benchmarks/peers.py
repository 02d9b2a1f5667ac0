"""Everything that computes an attention problem: ours, torch's, FlexAttention, FA3 and FA4.

Each peer is a function of (case, tensors) that does once what a user would do once (masks, block
masks, compilation) and returns a call that gives `out` in the layout of query. It raises
SkippedError, or
whatever its library raises, where it cannot take the problem.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext
from benchmarks.attention import Attention, Tensors
from flashattn_ext._registration import devices_with_kernel

Attend = Callable[[], Tensor]
OUTSIDE = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}  # modules


class SkippedError(Exception):
    """Why a peer does not run a case."""


def ours(case: Attention, t: Tensors) -> Attend:
    kind = case.op + ("_varlen" if case.lengths else "")
    device = t.query.device.type
    for direction in ("forward", "backward"):
        if direction == "backward" and not case.trains:
            continue
        if device not in devices_with_kernel(f"{kind}_{direction}"):
            raise SkippedError(f"{kind}_{direction} has no kernel for {device}")
    function = getattr(flashattn_ext, kind)
    window = (case.window - 1, 0) if case.window else None
    options = {"causal": case.causal, "window": window, "alignment": "top_left"}
    options |= {"dropout_p": case.dropout_p, "rng_state": t.rng_state}
    if case.lengths:
        longest = max(case.lengths)
        offsets = (t.cu_seqlens, t.cu_seqlens, longest, longest)
        return lambda: function(t.query, t.key, t.value, *offsets, **options)
    options |= {"attn_mask": t.mask, "key_lengths": t.key_lengths}
    return lambda: function(t.query, t.key, t.value, **options)


def kernel_of_ours(case: Attention, t: Tensors) -> str:
    """What `explain` says of the call."""
    kind = case.op + ("_varlen" if case.lengths else "")
    return flashattn_ext.explain(t.query, t.key, t.value, function=kind).kernel


def dense_mask(case: Attention, t: Tensors) -> Tensor | None:
    """Window, key lengths and mask as the one mask that torch's function takes."""
    mask = t.mask
    if case.window:
        row = torch.arange(case.len_q, device=t.query.device)[:, None]
        col = torch.arange(case.len_k, device=t.query.device)
        mask = both(mask, ((col <= row) & (col > row - case.window))[None, None])
    if case.key_lengths:
        col = torch.arange(case.len_k, device=t.query.device)
        mask = both(mask, col < t.key_lengths[:, None, None, None])
    return mask


def both(mask: Tensor | None, other: Tensor) -> Tensor:
    if mask is not None and mask.is_floating_point():
        raise SkippedError("a float mask with another mask")
    return other if mask is None else mask & other


def torch_attention(*backends: SDPBackend) -> Callable[[Attention, Tensors], Attend]:
    """torch.nn.functional.scaled_dot_product_attention, with torch's choice or one back end."""

    def prepare(case: Attention, t: Tensors) -> Attend:
        if case.lengths:
            return packed(case, t)
        mask = dense_mask(case, t)
        options = {"is_causal": case.causal and not case.window, "dropout_p": case.dropout_p}
        options |= {"attn_mask": mask, "enable_gqa": case.heads_q != case.heads_kv}
        if not backends:
            return lambda: scaled_dot_product_attention(t.query, t.key, t.value, **options)

        def attend() -> Tensor:
            with sdpa_kernel(list(backends)):
                return scaled_dot_product_attention(t.query, t.key, t.value, **options)

        return attend

    def packed(case: Attention, t: Tensors) -> Attend:
        """One sequence after the other: torch's function takes no packed batch."""
        if case.heads_q != case.heads_kv or case.window or backends:
            raise SkippedError("no packed batch")

        def attend() -> Tensor:
            inputs = (tensor.transpose(0, 1)[None] for tensor in (t.query, t.key, t.value))
            sequences = zip(*(tensor.split(case.lengths, 2) for tensor in inputs), strict=True)
            outs = [
                scaled_dot_product_attention(*sequence, is_causal=case.causal)
                for sequence in sequences
            ]
            return torch.cat(outs, 2)[0].transpose(0, 1)

        return attend

    return prepare


def torch_flash(case: Attention, t: Tensors) -> Attend:
    """torch's FlashAttention-2: by its function, or by its op for packed batches and windows."""
    if not (case.lengths or case.window):
        return torch_attention(SDPBackend.FLASH_ATTENTION)(case, t)
    if case.dropout_p or case.key_lengths or t.mask is not None:
        raise SkippedError("not with a window or a packed batch")
    if case.lengths:
        longest = max(case.lengths)
        query, key, value = t.query, t.key, t.value
        sizes = (t.cu_seqlens, t.cu_seqlens, longest, longest)
    else:
        query, key, value = (x.transpose(1, 2) for x in (t.query, t.key, t.value))
        sizes = (None, None, case.len_q, case.len_k)
    window = {"window_size_left": case.window - 1, "window_size_right": 0} if case.window else {}

    def attend() -> Tensor:
        causal = case.causal or bool(case.window)
        out = torch.ops.aten._flash_attention_forward(
            query, key, value, *sizes, 0.0, causal, False, **window
        )[0]
        return out if case.lengths else out.transpose(1, 2)

    return attend


def flex(case: Attention, t: Tensors) -> Attend:
    """FlexAttention, compiled for the case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.dropout_p or case.lengths:
        raise SkippedError("no dropout, no packed batch")
    lengths, mask = t.key_lengths, t.mask
    boolean = mask is not None and not mask.is_floating_point()

    def visible(b, h, row, col):
        seen = row >= 0
        if case.causal or case.window:
            seen = seen & (col <= row)
        if case.window:
            seen = seen & (col > row - case.window)
        if lengths is not None:
            seen = seen & (col < lengths[b])
        if boolean:
            seen = seen & mask[0, 0, row, col]
        return seen

    def biased(score, b, h, row, col):
        return score + mask[0, h, row, col]

    block_mask = None
    if case.options != "full" and case.mask != "float":
        batch = case.batch if case.key_lengths else None
        block_mask = create_block_mask(visible, batch, None, case.len_q, case.len_k, t.query.device)
    torch._dynamo.reset()  # one function is compiled for every case; its cache has a limit
    compiled = torch.compile(flex_attention, dynamic=False)
    score_mod = biased if case.mask == "float" else None
    grouped = case.heads_q != case.heads_kv
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": grouped}
    return lambda: compiled(t.query, t.key, t.value, **options)


def outside(name: str, trains: bool) -> Callable[[Attention, Tensors], Attend]:
    """FlashAttention 3 or 4: (batch, length, heads, head_dim) or (total, heads, head_dim)."""

    def prepare(case: Attention, t: Tensors) -> Attend:
        library = importlib.import_module(OUTSIDE[name])
        if case.dtype == "fp32" or case.dropout_p or case.key_lengths or t.mask is not None:
            raise SkippedError("not this option or dtype")
        if case.trains and not trains:
            raise SkippedError("forward only")
        options = {"causal": case.causal and not case.window}
        options |= {"window_size": (case.window - 1, 0)} if case.window else {}
        if case.lengths:
            longest = max(case.lengths)
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            options |= {"cu_seqlens_q": t.cu_seqlens, "cu_seqlens_k": t.cu_seqlens}
            function = library.flash_attn_varlen_func
            return lambda: first(function(t.query, t.key, t.value, **options))
        query, key, value = (x.transpose(1, 2) for x in (t.query, t.key, t.value))
        function = library.flash_attn_func
        return lambda: first(function(query, key, value, **options)).transpose(1, 2)

    return prepare


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


def first(result) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


MATH = torch_attention(SDPBackend.MATH)
PEERS: dict[str, Callable[[Attention, Tensors], Attend]] = {
    "ours": ours,
    "torch": torch_attention(),
    "torch math": MATH,
    "torch flash": torch_flash,
    "torch efficient": torch_attention(SDPBackend.EFFICIENT_ATTENTION),
    "torch cudnn": torch_attention(SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "fa3": outside("fa3", trains=False),
    "fa4": outside("fa4", trains=True),
}


def peers_for(case: Attention, device: str) -> list[str]:
    """The peers that are worth their time for a case."""
    if case.op == "naive_attention" or case.suite == "accuracy":
        return ["ours", "torch", "torch math"] if device == "cpu" else ["ours", "torch math"]
    if device == "cpu":
        return ["ours", "torch"]
    names = ["ours", "torch flash", "torch efficient", "torch cudnn"]
    names += [name for name, module in OUTSIDE.items() if is_installed(module)]
    # It is compiled for each case, which takes seconds: only where others have no kernel.
    unusual = case.mask or case.window or case.key_lengths
    return [*names, "flex"] if unusual else names
