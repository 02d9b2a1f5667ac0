"""Rows: their columns, the CSV, and the table on the terminal."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

Row = dict[str, object]

CASE_FIELDS = (
    "suite", "device", "op", "direction", "dtype", "shape", "options", "batch", "heads_q",
    "heads_kv", "len_q", "len_k", "head_dim",
)  # fmt: skip
ERRORS = ("error_out", "error_query", "error_key", "error_value", "error_mask")
MEASURED_FIELDS = (
    "implementation", "kernel", "note", "milliseconds", "spread", "rounds", "bound_milliseconds",
    "share_of_bound", "tflops", "gbytes", "times_ours", *ERRORS, "extra_mib",
)  # fmt: skip
MACHINE_FIELDS = (
    "machine", "instruction_set", "driver", "threads", "torch", "cuda", "package", "commit",
    "clock_mhz", "peak_tflops", "peak_unit", "control_tflops", "copy_gbytes",
)  # fmt: skip
FIELDS = (*CASE_FIELDS, *MEASURED_FIELDS, *MACHINE_FIELDS)

INTEGERS = {"batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim", "rounds", "threads",
            "clock_mhz"}  # fmt: skip
WORDS = {"suite", "device", "op", "direction", "dtype", "shape", "options", "implementation",
         "kernel", "note", "machine", "instruction_set", "driver", "torch", "cuda", "package",
         "commit", "peak_unit"}  # fmt: skip


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n", restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({field: written(value) for field, value in row.items()})


def joined(kept: list[Row], new: list[Row]) -> list[Row]:
    """The new rows, behind those of other cases."""
    cases = {case_of(row) for row in new}
    return [row for row in kept if case_of(row) not in cases] + new


def case_of(row: Row) -> tuple:
    return tuple(row[field] for field in CASE_FIELDS)


def written(value: object) -> object:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else value


def read_csv(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return [{field: parsed(field, text) for field, text in row.items()}
                for row in csv.DictReader(file)]  # fmt: skip


def parsed(field: str, text: str) -> object:
    if field in WORDS:
        return text
    if text == "":
        return None
    return int(text) if field in INTEGERS else float(text)


def table_line(rows: list[Row]) -> str:
    """One case: its bound, our time and rate, and how many times faster than each peer we are."""
    ours = next((row for row in rows if row["implementation"] == "ours"), None)
    case = rows[0]
    text = f"{case['direction']:8} {case['dtype']} {case['shape']:<24} {case['options']:<20}"
    if ours is None or not ours.get("milliseconds"):
        text += f" | ours: {ours.get('note', 'not asked for') if ours else 'not asked for'}"
    else:
        rate = rate_text(ours)
        text += (
            f" | ours {ours['milliseconds']:8.3f} ms, bound {ours['bound_milliseconds']:.3f} ms,"
            f" {rate} ({ours['share_of_bound']:4.0%})"
        )
    peers = [peer_text(row) for row in rows if row["implementation"] != "ours"]
    return " | ".join([text, *peers])


def rate_text(row: Row) -> str:
    if not row["tflops"]:
        return f"{row['gbytes']:7.1f} GB/s"
    if row["tflops"] < 1:
        return f"{row['tflops'] * 1e3:6.1f} GFLOP/s"
    return f"{row['tflops']:6.1f} TFLOP/s"


def peer_text(row: Row) -> str:
    name = row["implementation"]
    if not row.get("milliseconds"):
        return f"{name}: {short(row.get('note') or 'no time')}"
    ratio = f" {row['times_ours']:.2f}x" if row.get("times_ours") else ""
    return f"{name} {row['milliseconds']:.3f} ms{ratio}"


def short(text: str, length: int = 40) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


class Progress:
    """tqdm's bar on a terminal that has it, else the lines alone."""

    def __init__(self, title: str, steps: int):
        self.bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=steps, desc=title, unit="case", dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.write(line)
            self.bar.update()
