"""Calls of so many blocks that they come in several sections (csrc/cuda/flash/block_order.h)."""

from __future__ import annotations

import pytest
import torch

import flashattn_ext

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# (heads_q, heads_kv, length, head_dim): tiles do not divide lengths, nor sections heads.
# A call of FEW heads has too many blocks to be split over keys, which would round otherwise.
PROBLEMS = ((302, 302, 650, 64), (151, 151, 650, 128), (214, 107, 330, 256), (606, 202, 650, 40))
FEW = 40


def results(query, key, value, grad_out, rng_state, **options):
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    out, lse = flashattn_ext.flash_attention(
        *leaves, deterministic=True, return_lse=True, rng_state=rng_state, **options
    )
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out))


@pytest.mark.parametrize("options", ({"causal": True}, {"window": (200, 0)}), ids=str)
@pytest.mark.parametrize(("heads_q", "heads_kv", "length", "head_dim"), PROBLEMS)
def test_many_heads_give_what_few_give(heads_q, heads_kv, length, head_dim, options):
    torch.manual_seed(0)
    shape = (2, heads_q, length, head_dim)
    query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, heads_kv, length, head_dim, device="cuda", dtype=torch.bfloat16)
    grad_out = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    many = results(query, key, value, grad_out, None, **options)
    group = heads_q // heads_kv
    for batch in range(2):
        for first in range(0, heads_kv, FEW):
            last = min(first + FEW, heads_kv)
            kv = slice(last - FEW, last)
            q = slice(kv.start * group, kv.stop * group)
            few = results(
                query[batch : batch + 1, q], key[batch : batch + 1, kv],
                value[batch : batch + 1, kv], grad_out[batch : batch + 1, q], None, **options,
            )  # fmt: skip
            for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), many, few, strict=True):
                heads = kv if name in ("dk", "dv") else q
                assert torch.equal(ours[batch : batch + 1, heads], theirs), (name, batch, first)
