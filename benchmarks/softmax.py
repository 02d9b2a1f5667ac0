"""Softmax against a device copy and against torch, interleaved in one process.

    python -m benchmarks.softmax --output benchmarks/results/softmax.csv

A softmax reads each element once and writes it once, so the bound is what a device copy reaches:
the table gives bytes per second as a share of the copy's in the same round. Backward moves three
tensors. Rows that no chip can hold (4 x 2^26) must be read twice; their bytes count that. Each
result is held against torch's before it is timed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
from pathlib import Path

import torch

import flashattn_ext  # noqa: F401  (registers the ops)

OPS = torch.ops.flashattn_ext
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 50257, 65536, 131072, 262144)
TOTAL = 2**28
READ_TWICE = 2**26


def problems(total, lengths):
    for length in lengths:
        yield "rows", (total // length, length), 1
    yield "rows", (4, total // 4), 1
    yield "columns", (total // 2**16, 1024, 64), 1
    yield "columns", (total // 2**20, 256, 4096), 1


def milliseconds(call):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(calls, rounds):
    """Median milliseconds of each call; every round runs all of them."""
    times = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            elapsed = milliseconds(call)
            if turn:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def check(got, want):
    """Both are rounded from nearly the same numbers: a few units of the last place apart."""
    got, want = got.float(), want.float()
    scale = want.abs().amax()
    error = ((got - want).abs().amax() / scale).item()
    assert error < 0.02, f"wrong result: relative error {error:.3g}"
    assert torch.isfinite(got).all()


def measure(direction, dtype, shape, dim, rounds):
    source = torch.randn(shape, device="cuda", dtype=dtype)
    target = torch.empty_like(source)
    element_bytes = source.numel() * source.element_size()
    if direction == "forward":
        moved = 2
        calls = {
            "torch": lambda: torch.softmax(source, dim),
            "ours": lambda: OPS.softmax.default(source, dim),
        }
    else:
        moved = 3
        output = torch.softmax(source, dim)
        calls = {
            "torch": lambda: torch._softmax_backward_data(source, output, dim, dtype),
            "ours": lambda: OPS.softmax_backward.default(source, output, dim, dtype),
        }
    check(calls["ours"](), calls["torch"]())
    times = interleaved({"copy": lambda: target.copy_(source), **calls}, rounds)
    if shape[dim] >= READ_TWICE:
        moved = 2 * moved - 1
    rate = {name: moved * element_bytes / ms / 1e9 for name, ms in times.items()}
    rate["copy"] = 2 * element_bytes / times["copy"] / 1e9
    return {
        "ours_ms": round(times["ours"], 4),
        "torch_ms": round(times["torch"], 4),
        "copy_TBs": round(rate["copy"], 3),
        "torch_TBs": round(rate["torch"], 3),
        "ours_TBs": round(rate["ours"], 3),
        "of_copy": round(rate["ours"] / rate["copy"], 3),
        "of_torch": round(times["torch"] / times["ours"], 3),
    }


def machine():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "commit": commit,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="CSV file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--total", type=int, default=TOTAL, help="elements of each tensor")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--commit", help="where git is missing")
    options = parser.parse_args()

    about = machine()
    about["commit"] = options.commit or about["commit"]
    rows = []
    for direction in ("forward", "backward"):
        for dtype in options.dtypes:
            for kind, shape, dim in problems(options.total, options.lengths):
                row = {"direction": direction, "dtype": dtype, "kind": kind, "shape": shape}
                row["shape"] = "x".join(map(str, shape))
                row |= measure(direction, DTYPES[dtype], shape, dim, options.rounds)
                rows.append(row | about)
                print(
                    f"{direction:8} {dtype} {row['shape']:>16}  ours {row['ours_ms']:8.3f} ms  "
                    f"{row['ours_TBs']:.2f} TB/s  {row['of_copy']:.3f} of copy "
                    f"({row['copy_TBs']:.2f})  {row['of_torch']:.2f} x torch",
                    flush=True,
                )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
