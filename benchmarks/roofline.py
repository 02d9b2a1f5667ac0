"""The ceilings of the machine, measured in the run that they are compared with.

CPU: the rate of multiply-adds in registers on all threads (peak.cpp, by the machine's own C++
compiler) and of a large copy. GPU: a large matrix product of the vendor's library and a large
device copy. The matrix product is measured on the CPU as well, as the control: it moves only when
the machine does.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.attention import DTYPES
from benchmarks.timing import CpuTimer, CudaTimer, timer_for

SOURCE = Path(__file__).with_name("peak.cpp")
TRIALS = 7


@dataclasses.dataclass
class Ceilings:
    """flops: floating-point operations a second; bandwidth: bytes read plus written a second."""

    bandwidth: float
    flops: dict[str, float]  # by dtype
    unit: dict[str, str]  # by dtype: what reaches it
    control: dict[str, float]  # by dtype: the matrix product's rate
    clock_mhz: int

    def bound(self, flops: float, moved: float, dtype: str) -> float:
        """Seconds that a problem takes at least, if arithmetic and memory overlap."""
        return max(flops / self.flops[dtype], moved / self.bandwidth)


def measure(device: str, dtypes: list[str], quick: bool = False) -> Ceilings:
    """quick: smaller problems, for tests."""
    timer = timer_for(device)
    elements = 2**14 if quick else (2**28 if device == "cuda" else 2**26)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    seconds = fastest(timer, lambda: target.copy_(source))
    bandwidth = 2 * source.numel() * source.element_size() / seconds
    control = {dtype: matrix_rate(timer, device, dtype, quick) for dtype in dtypes}
    if device == "cuda":
        unit = dict.fromkeys(dtypes, "matrix product")
        return Ceilings(bandwidth, dict(control), unit, control, gpu_clock_mhz())
    return cpu_ceilings(bandwidth, control, quick)


def fastest(timer: CpuTimer | CudaTimer, call) -> float:
    """A ceiling is the best that was seen."""
    timer.sample(call)
    return min(timer.sample(call) for _ in range(TRIALS))


def matrix_rate(timer, device: str, dtype: str, quick: bool) -> float:
    size = 64 if quick else {"cpu": 1536, "cuda": 4096 if dtype == "fp32" else 8192}[device]
    left, right = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    timer.sample(lambda: left @ right)
    samples = [timer.sample(lambda: left @ right) for _ in range(TRIALS)]
    return 2 * size**3 / statistics.median(samples)


def cpu_ceilings(bandwidth: float, control: dict[str, float], quick: bool) -> Ceilings:
    library = compile_peak()
    if library is None:  # no C++ compiler: the matrix product stands for the peak
        unit = dict.fromkeys(control, "matrix product")
        return Ceilings(bandwidth, dict(control), unit, control, 0)
    library.unit_bf16.restype = ctypes.c_char_p
    threads = torch.get_num_threads()
    flops, unit = {}, {}
    for dtype in control:
        name = "bf16" if dtype == "bf16" else "fp32"
        flops[dtype] = rate(getattr(library, f"flops_{name}"), threads, quick)
        unit[dtype] = library.unit_bf16().decode() if name == "bf16" else "fp32 multiply-add"
    clock = round(rate(library.cycles, 1, quick) / 1e6)
    return Ceilings(bandwidth, flops, unit, control, clock)


def compile_peak() -> ctypes.CDLL | None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        flags = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC"]
        command = [*compiler.split(), *flags, str(SOURCE), "-o", str(library)]
        if subprocess.run(command).returncode:
            return None
        return ctypes.CDLL(str(library))


def rate(function, threads: int, quick: bool) -> float:
    """Operations a second of all threads together: ctypes lets go of Python's lock."""
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_double
    count = 10**4
    while not quick and timed(function, count)[0] < 0.02:
        count *= 2
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 if quick else TRIALS):
            start = time.perf_counter()
            done = sum(pool.map(function, [count] * threads))
            best = max(best, done / (time.perf_counter() - start))
    return best


def timed(function, count: int) -> tuple[float, float]:
    start = time.perf_counter()
    done = function(count)
    return time.perf_counter() - start, done


def gpu_clock_mhz() -> int:
    """While a matrix product runs, so that it is the clock under load."""
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        left @ left
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    torch.cuda.synchronize()
    return int(answer) if answer.strip().isdigit() else 0
