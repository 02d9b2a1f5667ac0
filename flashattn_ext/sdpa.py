"""A drop-in for torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import handle_torch_function, has_torch_function

from flashattn_ext._arguments import FLOATING, MAX_HEAD_DIM
from flashattn_ext._registration import devices_with_kernel, error
from flashattn_ext.flash_attention import flash_attention

_torch_attention = torch._C._nn.scaled_dot_product_attention
_DEVICES = (*devices_with_kernel("flash_attention_forward"), "meta")
_PLAIN_TYPES = frozenset(
    (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor, FunctionalTensor)
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention, computed by :func:`flashattn_ext.flash_attention`.

    Args:
        query: (..., heads_q, len_q, head_dim), any floating dtype and strides, 2 dimensions or
            more.
        key: (..., heads_kv, len_k, head_dim).
        value: (..., heads_kv, len_k, head_dim_v). Leading dimensions broadcast.
        attn_mask: bool (True = attend) or float (added to the scores), of any shape that broadcasts
            to (..., heads_q, len_q, len_k), or a `torch.nn.attention.bias.CausalBias`.
        dropout_p: share of the probabilities to drop, in [0, 1]; there is no training flag.
        is_causal: hides the keys right of the diagonal from the top left corner; with attn_mask:
            what both show.
        scale: default 1 / sqrt(head_dim).
        enable_gqa: heads_q may be a multiple of heads_kv.

    Returns:
        (..., heads_q, len_q, head_dim_v) in dtype and memory order of query. A row that sees no key
        is 0, with zero gradients.

    Where torch's backends disagree (masked rows, `finfo.min` in masks, mask with is_causal), the
    rule is that of :func:`flashattn_ext.flash_attention` on every device. What it does not do
    (nested, sparse, quantised or complex inputs, other devices, head dims above 512, inside
    `torch.nn.attention.sdpa_kernel`) goes to torch's own function;
    `flashattn_ext.explain(..., function="scaled_dot_product_attention")` says so and why.

    Gradients: query, key, value and float attn_mask, to any order.
    """
    inputs = (query, key, value, attn_mask)
    if has_torch_function(inputs) and not _is_only_causal_bias(inputs):
        return handle_torch_function(
            scaled_dot_product_attention, inputs, query, key, value, attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    alignment = "top_left"
    if attn_mask is not None and is_causal_bias(attn_mask):
        if is_causal:
            raise error("is_causal", "False with a CausalBias as attn_mask", True)
        is_causal, alignment, attn_mask = True, _alignment_of(attn_mask, query, key), None
    if reason_for_torch(query, key, value, attn_mask):
        if alignment == "bottom_right":
            attn_mask, is_causal = _bottom_right_mask(query, key), False
        return _torch_function(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.size(-1) == 0 and key.size(-1) == 0:
        # torch's rule for vectors without elements: all scores are 0 (flash_attention gives zeros).
        query, key = (torch.nn.functional.pad(tensor, (0, 1)) for tensor in (query, key))
        scale = 1.0
    if not _is_plain_batch(query, key, value, attn_mask, enable_gqa):
        return _attend_any_rank(
            query, key, value, attn_mask, enable_gqa,
            dropout_p=dropout_p, causal=is_causal, alignment=alignment, scale=scale,
        )  # fmt: skip
    return flash_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p,
        causal=is_causal, alignment=alignment, scale=scale,
    )  # fmt: skip


def _torch_function(*args, **kwargs) -> Tensor:
    if torch._C._is_torch_function_enabled():
        return _torch_attention(*args, **kwargs)
    # A subclass that did not know our function may know torch's: it is asked once more.
    with torch._C._EnableTorchFunction():
        return _torch_attention(*args, **kwargs)


def reason_for_torch(query, key, value, attn_mask) -> str | None:
    """Why a call is left to torch's own function; None if it is not."""
    for tensor in (query, key, value, attn_mask):
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES:
            return f"an argument is a {type(tensor).__name__}, not a plain tensor"
        if tensor.layout is not torch.strided:
            return f"an argument has layout {tensor.layout}"
        if tensor.is_nested:
            return "an argument is a nested tensor"
    if torch.jit.is_tracing():
        return "torch.jit.trace records torch's own op, for any size and any exporter"
    if query.dtype not in FLOATING:
        return f"query has dtype {query.dtype}"
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        return "an argument has fewer than 2 dimensions"
    if query.size(-1) > MAX_HEAD_DIM or value.size(-1) > MAX_HEAD_DIM:
        return f"a head dim is above {MAX_HEAD_DIM}"
    device_type = query.device.type
    if device_type not in _DEVICES:
        return f"this build of flashattn_ext has no attention kernel for {device_type}"
    if not _all_backends_enabled():
        return "torch.nn.attention.sdpa_kernel (or a global switch) restricts torch's backends"
    return None


def _all_backends_enabled() -> bool:
    return (
        torch._C._get_flash_sdp_enabled()
        and torch._C._get_mem_efficient_sdp_enabled()
        and torch._C._get_math_sdp_enabled()
        and torch._C._get_cudnn_sdp_enabled()
    )


def is_causal_bias(tensor) -> bool:
    # By name first: importing torch.nn.attention.bias is slow, and rarely needed.
    if type(tensor).__name__ != "CausalBias":
        return False
    from torch.nn.attention.bias import CausalBias

    return type(tensor) is CausalBias


def _is_only_causal_bias(inputs) -> bool:
    """Whether __torch_function__ is there for a CausalBias mask alone, which we do ourselves."""
    return is_causal_bias(inputs[3]) and not has_torch_function(inputs[:3])


def _alignment_of(bias, query: Tensor, key: Tensor) -> str:
    from torch.nn.attention.bias import CausalVariant

    if bias.variant == CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv:
        return "top_left"
    expected = (query.size(-2), key.size(-2))
    if (bias.seq_len_q, bias.seq_len_kv) != expected:
        lengths = (bias.seq_len_q, bias.seq_len_kv)
        raise error("attn_mask", f"a CausalBias of (len_q, len_k) = {expected}", lengths)
    return "bottom_right"


def _bottom_right_mask(query: Tensor, key: Tensor) -> Tensor:
    len_q, len_k = query.size(-2), key.size(-2)
    return torch.ones(len_q, len_k, dtype=torch.bool, device=query.device).tril(len_k - len_q)


def _is_plain_batch(query, key, value, attn_mask, enable_gqa: bool) -> bool:
    """Whether the arguments are those of flash_attention as they stand."""
    if not (query.dim() == key.dim() == value.dim() == 4):
        return False
    if attn_mask is not None and attn_mask.dim() > 4:
        return False
    heads_q, heads_kv = query.size(1), key.size(1)
    return (
        query.size(0) == key.size(0) == value.size(0)
        and heads_kv == value.size(1)
        and (heads_q == heads_kv or enable_gqa or heads_kv == 1)
    )


def _attend_any_rank(query, key, value, attn_mask, enable_gqa: bool, **options) -> Tensor:
    """Brings leading dimensions to one batch and one head dimension, and the result back."""
    rank = max(query.dim(), key.dim(), value.dim())
    query, key, value = (_with_rank(max(rank, 4), tensor) for tensor in (query, key, value))
    query, key, value = _match_heads(query, key, value, enable_gqa)
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = (
        tensor.expand(*batch, *tensor.shape[-3:]).flatten(0, -4) for tensor in (query, key, value)
    )
    if attn_mask is not None and attn_mask.dim() > 3:
        attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, -4)
    out = flash_attention(query, key, value, attn_mask=attn_mask, **options)
    out = out.unflatten(0, batch)
    for _ in range(4 - rank):  # 2 and 3 dimensions: those added in front
        out = out.squeeze(0)
    return out


def _with_rank(rank: int, tensor: Tensor) -> Tensor:
    return tensor.reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape))


def _match_heads(query, key, value, enable_gqa: bool):
    """Heads as flash_attention wants them: one number for key and value, a divisor of query's."""
    heads = [tensor.size(-3) for tensor in (query, key, value)]
    heads_q, heads_k, heads_v = heads
    if not enable_gqa:
        try:
            (common,) = torch.broadcast_shapes(*((size,) for size in heads))
        except RuntimeError:
            expected = "as many heads as key and value, or 1 (or enable_gqa=True)"
            raise error("query", expected, f"heads {heads_q}, {heads_k} and {heads_v}") from None
        query = _expand_heads(query, common)
        if heads_k != heads_v:
            key, value = (_expand_heads(tensor, common) for tensor in (key, value))
    elif heads_k != heads_v:
        for name, size in (("key", heads_k), ("value", heads_v)):
            if size == 0 or heads_q % size != 0:
                raise error(name, f"heads that divide those of query, {heads_q}", size)
        key = key.repeat_interleave(heads_q // heads_k, -3)
        value = value.repeat_interleave(heads_q // heads_v, -3)
    return query, key, value


def _expand_heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])


class _Switch:
    """What torch.nn.functional.scaled_dot_product_attention is, and how many wanted it changed."""

    def __init__(self):
        self.lock = threading.RLock()
        self.installed = False
        self.contexts = 0
        self.before = None

    def set(self, *, installed: bool | None = None, contexts: int = 0) -> None:
        with self.lock:
            was_active = self.installed or self.contexts > 0
            self.installed = self.installed if installed is None else installed
            self.contexts += contexts
            active = self.installed or self.contexts > 0
            functional = torch.nn.functional
            if active and not was_active:
                self.before = functional.scaled_dot_product_attention
                functional.scaled_dot_product_attention = scaled_dot_product_attention
                _make_scriptable()
            elif was_active and not active:
                # Somebody else may have replaced ours meanwhile; theirs stays.
                if functional.scaled_dot_product_attention is scaled_dot_product_attention:
                    functional.scaled_dot_product_attention = self.before
                self.before = None


_switch = _Switch()


def install() -> None:
    """Makes `torch.nn.functional.scaled_dot_product_attention` ours, for the whole process.

    Reaches all code that looks the function up when it calls it, as `torch.nn` modules do; not
    names bound earlier by `from ... import`, graphs compiled or scripted earlier, nor the fast path
    of `nn.TransformerEncoderLayer` in eval mode, which calls kernels of its own
    (`torch.backends.mha.set_fastpath_enabled(False)` switches it off). Calling it twice is fine.
    """
    _switch.set(installed=True)


def uninstall() -> None:
    """Undoes :func:`install`."""
    _switch.set(installed=False)


@contextlib.contextmanager
def use_as_sdpa():
    """Context in which `torch.nn.functional.scaled_dot_product_attention` is ours.

    May be nested, and used together with :func:`install`. The function is one for all threads:
    while any thread is inside, all are.
    """
    _switch.set(contexts=1)
    try:
        yield
    finally:
        _switch.set(contexts=-1)


def _make_scriptable() -> None:
    """torch.jit.script goes on to see torch's own function where ours is installed."""
    from torch.jit import _builtins

    if _builtins._find_builtin(scaled_dot_product_attention) is None:
        _builtins._register_builtin(
            scaled_dot_product_attention, "aten::scaled_dot_product_attention"
        )
