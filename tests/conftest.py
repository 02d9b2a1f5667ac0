"""What all tests share: import paths, devices, poisoned memory, a fixed seed."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
ROOT = Path(__file__).parents[1]
if (ROOT / "benchmarks" / "run.py").exists():
    sys.path.append(str(ROOT))  # behind the installed package
else:  # the tests were copied away from the sources
    collect_ignore = ["benchmarks"]

# malloc fills memory with the lowest byte of this value ^ 0xff. 0xff everywhere: NaN in any dtype.
NAN_BYTES_EVERYWHERE = 0x100
M_PERTURB = -6


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: needs a GPU, or more than a few seconds")
    torch.set_num_threads(1)
    # One seed for all workers of a run, which inherit the environment.
    os.environ.setdefault("FLASHATTN_EXT_SEED", str(random.SystemRandom().randrange(2**31)))


def pytest_report_header():
    return f"random problems: FLASHATTN_EXT_SEED={os.environ['FLASHATTN_EXT_SEED']}"


def has_cuda_kernel(op):
    """Whether this machine can run `torch.ops.flashattn_ext.<op>` on a GPU."""
    from flashattn_ext._registration import devices_with_kernel

    return torch.cuda.is_available() and "cuda" in devices_with_kernel(op)


def devices():
    found = ["cpu"]
    if torch.cuda.is_available():
        found.append(pytest.param("cuda", marks=pytest.mark.slow))
    return found


# The ops behind the functions that tests are parametrized over, by the name of the parameter `op`.
OPS_OF = {
    "flash": ("flash_attention_forward", "flash_attention_backward"),
    "varlen": ("flash_attention_varlen_forward", "flash_attention_varlen_backward"),
    "naive": ("naive_attention_forward", "naive_attention_backward"),
}


def ops_of(request):
    """The ops that a test runs: those of its parameter `op`, or of its module's list OPS."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    return OPS_OF.get(parameters.get("op"), getattr(request.module, "OPS", ()))


@pytest.fixture(params=devices())
def device(request):
    """cpu, and cuda where there is a GPU and every op of the test has a CUDA kernel."""
    if request.param == "cuda":
        for op in ops_of(request):
            if not has_cuda_kernel(op):
                pytest.skip(f"{op} has no CUDA kernel")
    return request.param


def poison_memory(device="cpu"):
    """Fills memory that the next allocations reuse with NaN, so that an unwritten output shows."""
    largest = 19 if device == "cpu" else 25
    sizes = [2**n for n in range(4, largest)] + [3 * 2**n for n in range(4, largest - 2)]
    tensors = [torch.full((size,), float("nan"), device=device) for size in sizes for _ in range(2)]
    del tensors


def perturb_malloc(value):
    """Tells the C library what to fill memory with; False where it cannot."""
    try:
        return ctypes.CDLL(None).mallopt(M_PERTURB, value) == 1
    except (AttributeError, OSError):
        return False


@pytest.fixture(autouse=True, scope="session")
def malloc_is_poisoned():
    """Where the C library can, all memory that malloc gives out is filled with NaN."""
    yield perturb_malloc(NAN_BYTES_EVERYWHERE)
    perturb_malloc(0)


@pytest.fixture
def untouched_malloc():
    """Memory as the system gives it, for tests of tensors far larger than the machine."""
    perturb_malloc(0)
    yield
    perturb_malloc(NAN_BYTES_EVERYWHERE)


@pytest.fixture
def deterministic_algorithms():
    """Backward on CUDA adds in any order unless it is told otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _clean_start(request, malloc_is_poisoned):
    """Every test starts from the same seed and from poisoned memory."""
    torch.manual_seed(0)
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if parameters.get("device") == "cuda":
        poison_memory("cuda")
    elif not malloc_is_poisoned:
        poison_memory("cpu")
