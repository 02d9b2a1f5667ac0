"""Exact attention for PyTorch, on CPU and CUDA.

>>> import torch, flashattn_ext
>>> query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
>>> flashattn_ext.flash_attention(query, key, value, causal=True).shape
torch.Size([1, 2, 4, 8])
"""

from flashattn_ext import _library  # isort: skip  # the op library: nothing works before it
from flashattn_ext import _flops, reference
from flashattn_ext._version import __version__
from flashattn_ext.checkpointing import sac_save_ops
from flashattn_ext.explain import explain
from flashattn_ext.flash_attention import flash_attention, flash_attention_varlen
from flashattn_ext.merge_states import merge_states
from flashattn_ext.naive_attention import naive_attention
from flashattn_ext.random import dropout_mask, reserve_rng
from flashattn_ext.sdpa import install, scaled_dot_product_attention, uninstall, use_as_sdpa
from flashattn_ext.softmax import log_softmax, softmax

del _library, _flops

__all__ = [
    "__version__",
    "dropout_mask",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "install",
    "log_softmax",
    "merge_states",
    "naive_attention",
    "reference",
    "reserve_rng",
    "sac_save_ops",
    "scaled_dot_product_attention",
    "softmax",
    "uninstall",
    "use_as_sdpa",
]
