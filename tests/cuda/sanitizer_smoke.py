"""A short run of every CUDA op, for compute-sanitizer:

    compute-sanitizer --tool memcheck python tests/cuda/sanitizer_smoke.py

torch's caching allocator is off, so that an access past a tensor is past an allocation.
"""

import os

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


def main():
    ops = torch.ops.flashattn_ext
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape, dim in SHAPES:
            exact = torch.randn(shape, device="cuda", dtype=dtype)
            shifted = torch.randn(exact.numel() + 1, device="cuda", dtype=dtype)[1:].view(shape)
            for tensor in (exact, shifted):
                for name in ("softmax", "log_softmax"):
                    output = getattr(ops, name).default(tensor, dim)
                    getattr(ops, f"{name}_backward").default(tensor, output, dim, dtype)
    state = torch.tensor([1, 2], device="cuda")
    for len_k in (32, 33, 128):
        flashattn_ext.dropout_mask(state, 2, 2, 3, len_k, 0.5)
    torch.cuda.synchronize()
    print("smoke set done")


if __name__ == "__main__":
    main()
