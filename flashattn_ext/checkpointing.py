"""Help for activation checkpointing."""

from __future__ import annotations

import torch


def sac_save_ops() -> list[torch._ops.OpOverload]:
    """The ops whose results a selective-checkpoint policy should keep: the expensive ones.

    For use with `torch.utils.checkpoint.create_selective_checkpoint_contexts`, which takes this
    list as it is. The results kept are linear in length (out and lse).
    """
    ops = torch.ops.flashattn_ext
    return [ops.flash_attention_forward.default, ops.flash_attention_varlen_forward.default]
