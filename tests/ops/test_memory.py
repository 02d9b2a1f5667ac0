"""Memory linear in length, in both directions and with every option; no copy of a mask."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

OPS = ("flash_attention_forward", "flash_attention_backward")

# Prints by how many bytes the memory of a process of its own rises over a call.
SCRIPT = """
import ctypes, json, sys
import torch, flashattn_ext
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # large blocks come from the system, and go back when freed

def resident(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

def problem(mode, length):
    dtype = torch.bfloat16 if "bf16" in mode else torch.float32
    shape = (1, 1, length, 32)
    tensors = [torch.randn(shape).to(dtype).requires_grad_("backward" in mode) for _ in range(3)]
    options = {"causal": True}
    if "dropout" in mode:
        options["dropout_p"] = 0.1
    if "mask" in mode:
        options["attn_mask"] = torch.zeros(length, length, dtype=torch.bool).logical_not_()
    if "deterministic" in mode:
        options["deterministic"] = True
    return tensors, options

def call(mode, tensors, options):
    if "packed" in mode:
        flat = [tensor[0].transpose(0, 1) for tensor in tensors]
        cu = torch.tensor([0, len(flat[0]) // 3, len(flat[0])])
        out = flashattn_ext.flash_attention_varlen(*flat, cu, cu, *[len(flat[0])] * 2, **options)
    else:
        out = flashattn_ext.flash_attention(*tensors, **options)
    if "backward" in mode:
        out.backward(torch.ones_like(out))

growth = {}
for mode in sys.argv[1:]:
    torch.set_num_threads(2 if "threads" in mode else 1)
    call(mode, *problem(mode, 64))
    for length in (2048, 4096):
        inputs = problem(mode, length)
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak starts anew from what is resident now
        before = resident("VmRSS")
        call(mode, *inputs)
        growth.setdefault(mode, []).append(resident("VmHWM") - before)
        del inputs
print(json.dumps(growth))
"""

MODES = [
    "forward",
    "forward dropout",
    "forward mask",
    "backward",
    "backward dropout deterministic",
    "backward mask",
    "backward packed",
    "backward bf16 threads",
]


def growth():
    """{mode: [bytes for length 2048, for 4096]}"""
    try:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
    except OSError:
        pytest.skip("this system does not let a process reset its peak memory")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *MODES], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_buffer_of_length_squared():  # Y1, Y2, G1, G4, S8, R9, X5
    """4096 x 4096 fp32 scores are 64 MiB, a copied bool mask 16 MiB; a tensor is 0.5 MiB.

    Backward keeps a few partial sums of grad_query, more for longer sequences up to a limit.
    """
    tensor = 4096 * 32 * 4
    for mode, (short, long) in growth().items():
        limit = (24 if "backward" in mode else 3) * tensor
        assert long <= limit, f"{mode}: {long / 2**20:.1f} MiB, limit {limit / 2**20:.1f}"
        assert long <= 3.5 * short + tensor, f"{mode}: from {short} to {long} bytes"


def peak_on_gpu(length, **options):
    import flashattn_ext

    tensors = [
        torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flashattn_ext.flash_attention(*tensors, causal=True, **options)
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}, {"deterministic": True}], ids=str)
def test_doubling_the_length_doubles_the_memory_on_a_gpu(options):  # Y2, X5, R9
    from conftest import has_cuda_kernel

    if not all(map(has_cuda_kernel, OPS)):
        pytest.skip("no CUDA kernel")
    peak_on_gpu(256)
    short, long = peak_on_gpu(4096, **options), peak_on_gpu(8192, **options)
    assert long <= 2.2 * short


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_is_kept_after_a_call_on_a_gpu():  # Y4
    from conftest import has_cuda_kernel

    import flashattn_ext

    if not all(map(has_cuda_kernel, OPS)):
        pytest.skip("no CUDA kernel")
    query = torch.randn(1, 2, 512, 64, device="cuda")
    flashattn_ext.flash_attention(query, query, query)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        flashattn_ext.flash_attention(query, query, query)
    assert torch.cuda.memory_allocated() == before
