"""A short run of every CUDA op, for compute-sanitizer:

    compute-sanitizer --tool memcheck python tests/cuda/sanitizer_smoke.py

Families (softmax, naive, flash, dropout_mask) and dtypes (float16, ...) named behind it leave out
the others. Under racecheck cuBLAS's own 16-bit kernels fail, in torch.bmm alone too: leave out
naive attention in 16 bits there.

torch's caching allocator is off, so that an access past a tensor is past an allocation.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import flashattn_ext

SHAPES = (
    ((9, 7), 1),
    ((70, 24), 1),
    ((33, 129), 1),
    ((5, 500), 1),
    ((3, 1025), 1),
    ((2, 8192), 1),
    ((140, 4096), 1),
    ((2, 20001), 1),
    ((1, 65536), 1),
    ((1, 50257), 1),
    ((1, 1_500_000), 1),
    ((1, 700_001), 1),
    ((2, 33, 64), 1),
    ((2, 33, 3), 1),
    ((1030, 24), 0),
)


# (heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v): chunks whole and cut, every way to share
# a row, and rows longer than a block holds.
ATTENTION = (
    (2, 2, 5, 8, 4, 4),
    (4, 2, 9, 33, 8, 3),
    (2, 1, 3, 700, 8, 8),
    (2, 2, 17, 1024, 16, 16),
    (1, 1, 2, 8200, 8, 8),
    (1, 1, 2, 8201, 8, 8),
)


def problem(dtype, heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v):
    """Query, key and value, and one of every option."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    query = torch.randn(2, heads_q, len_q, head_dim, device="cuda", dtype=dtype)
    key = torch.randn(2, len_k, heads_kv, head_dim, device="cuda", dtype=dtype).transpose(1, 2)
    value = torch.randn(2, heads_kv, len_k, head_dim_v, device="cuda", dtype=dtype)
    every = {
        "attn_mask": torch.randn(heads_q, 1, len_k, device="cuda", dtype=dtype),
        "key_lengths": torch.tensor([len_k, len_k // 2], device="cuda"),
        "window": (len_k // 2, 3),
        "alignment": "bottom_right",
        "dropout_p": 0.3,
        "softcap": 3.0,
        "alibi_slopes": torch.rand(heads_q, device="cuda", dtype=real),
        "sinks": torch.randn(heads_q, device="cuda", dtype=dtype),
    }
    return query, key, value, every


def differentiated(*values):
    """The floating tensors among the values, each now a leaf."""
    leaves = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    return leaves


def softmax(dtype):
    ops = torch.ops.flashattn_ext
    for shape, dim in SHAPES:
        exact = torch.randn(shape, device="cuda", dtype=dtype)
        shifted = torch.randn(exact.numel() + 1, device="cuda", dtype=dtype)[1:].view(shape)
        for tensor in (exact, shifted):
            for name in ("softmax", "log_softmax"):
                output = getattr(ops, name).default(tensor, dim)
                getattr(ops, f"{name}_backward").default(tensor, output, dim, dtype)


def naive(dtype):
    for sizes in ATTENTION:
        query, key, value, every = problem(dtype, *sizes)
        for options in ({}, every):
            leaves = differentiated(query, key, value, *options.values())
            results = flashattn_ext.naive_attention(
                query, key, value, return_lse=True, return_max_logits=True, return_weights=True,
                **options,
            )  # fmt: skip
            total = (
                results[0].sum()
                + results[3].sum()
                + results[1].where(torch.isfinite(results[1]), 0).sum().to(dtype)
            )
            torch.autograd.grad(total, leaves)


# (heads_q, heads_kv, len_q, len_k, head_dim, head_dim_v): every width of the tiles, lengths around
# their edges, odd head dims, and few rows over keys that are split.
FLASH = (
    (2, 2, 65, 130, 64, 64),
    (4, 2, 70, 33, 40, 24),
    (2, 1, 129, 65, 128, 128),
    (2, 2, 17, 80, 96, 96),
    (1, 1, 33, 65, 192, 256),
    (1, 1, 20, 40, 300, 33),
    (2, 1, 3, 2000, 64, 64),
    (3, 1, 9, 31, 7, 5),
    (2, 2, 70, 144, 128, 128),
)


def masks(len_q, len_k, heads, dtype):
    """Those that kernels load as they lie in memory, where len_k allows it, with gradients in
    either way, and one that hides whole tiles."""
    yield torch.randn(2, heads, len_q, len_k, device="cuda", dtype=dtype)
    yield torch.randn(heads, len_q, len_k, device="cuda", dtype=dtype)
    yield torch.ones(len_q, len_k, device="cuda", dtype=torch.bool).triu(len_k // 2)


def flash(dtype):
    for sizes in FLASH:
        len_q, len_k = sizes[2:4]
        query, key, value, every = problem(dtype, *sizes)
        causal = {"causal": True, "alignment": "top_left", "deterministic": True}
        masked = ({"attn_mask": mask} for mask in masks(len_q, len_k, sizes[0], dtype))
        for options in ({}, causal, every, *masked):
            leaves = differentiated(query, key, value, *options.values())
            out = flashattn_ext.flash_attention(query, key, value, **options)
            torch.autograd.grad(out.sum(), leaves)
        rows = [tensor.detach().transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        differentiated(*rows)
        ends = [
            torch.tensor([0, length, 2 * length], device="cuda", dtype=torch.int32)
            for length in (len_q, len_k)
        ]
        out = flashattn_ext.flash_attention_varlen(*rows, *ends, len_q, len_k)
        torch.autograd.grad(out.sum(), rows)


def dropout_mask(dtype):
    del dtype  # it has none
    state = torch.tensor([1, 2], device="cuda")
    for len_k in (32, 33, 128):
        flashattn_ext.dropout_mask(state, 2, 2, 3, len_k, 0.5)


def main(chosen):
    dtypes = ("float16", "bfloat16", "float32", "float64")
    families = (softmax, naive, flash, dropout_mask)
    of_dtypes = [d for d in dtypes if d in chosen] or dtypes
    names = [f.__name__ for f in families]
    unknown = set(chosen) - set(dtypes) - set(names)
    assert not unknown, f"expected some of {[*names, *dtypes]}, got {sorted(unknown)}"
    of_families = [f for f in families if f.__name__ in chosen] or families
    for family in of_families:
        for dtype in of_dtypes:
            family(getattr(torch, dtype))
            torch.cuda.synchronize()
            print(family.__name__, dtype, "done", flush=True)
    print("smoke set done")


if __name__ == "__main__":
    main(sys.argv[1:])
