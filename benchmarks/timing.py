"""Interleaved timing: every round runs each call once, in turning order; medians count."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
LEAST_ROUNDS, MOST_ROUNDS = 3, 30
SHORTEST_SAMPLE = 2e-3  # seconds: a shorter call on the CPU is repeated within a sample
FLUSH_BYTES = 2**28  # several times the L2 cache
SLEEP_CYCLES = 1_000_000  # half a millisecond: longer than Python takes to enqueue a backward
SLOW = 0.1  # seconds: what takes longer needs no second warm-up


@dataclasses.dataclass(frozen=True)
class Timing:
    seconds: float  # median
    spread: float  # interquartile range over median
    rounds: int


class CpuTimer:
    def repeats(self, seconds: float) -> int:
        return max(1, math.ceil(SHORTEST_SAMPLE / max(seconds, 1e-9)))

    def sample(self, call: Call, repeats: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats


class CudaTimer:
    """Device events around each call. What runs before it empties the L2 cache, and keeps the
    device busy until the call is enqueued, so that the gap between is not measured."""

    def __init__(self):
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def repeats(self, seconds: float) -> int:
        return 1

    def sample(self, call: Call, repeats: int = 1) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def timer_for(device: str) -> CpuTimer | CudaTimer:
    return CudaTimer() if device == "cuda" else CpuTimer()


def interleave(
    calls: dict[str, Call], timer, seconds: float, most_rounds: int = MOST_ROUNDS
) -> dict[str, Timing]:
    """Times calls that have run before, within about `seconds` (but LEAST_ROUNDS rounds)."""
    first = {name: timer.sample(call) for name, call in calls.items()}
    # The first samples of short calls may be slow: later ones say how long a round takes.
    repeats = {name: timer.repeats(first[name]) for name in calls}
    start = time.perf_counter()
    for name, call in calls.items():
        if first[name] < SLOW:
            first[name] = timer.sample(call, repeats[name])
    round_time = time.perf_counter() - start + sum(t for t in first.values() if t >= SLOW)
    repeats = {name: timer.repeats(first[name]) for name in calls}
    rounds = min(most_rounds, max(LEAST_ROUNDS, int(seconds / max(round_time, 1e-9))))

    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    collects = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            at = turn % max(1, len(names))
            for name in names[at:] + names[:at]:
                samples[name].append(timer.sample(calls[name], repeats[name]))
    finally:
        if collects:
            gc.enable()
    return {name: summary(values) for name, values in samples.items()}


def summary(values: list[float]) -> Timing:
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median,) * 3
    return Timing(median, (high - low) / median if median else 0.0, len(values))


def as_graph(call: Call) -> Call:
    """The call captured in a CUDA graph, as serving loops run it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Budget:
    """Shares the seconds of a suite among its cases; what a case leaves goes to those after it."""

    def __init__(self, seconds: float, cases: int):
        self.end = time.perf_counter() + seconds
        self.cases = cases

    def share(self) -> float:
        """Seconds for the next case; 0 or less when nothing is left."""
        left = self.end - time.perf_counter()
        share = left / max(1, self.cases)
        self.cases -= 1
        return share
