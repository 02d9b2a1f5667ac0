"""The speeds and errors that the kernels are held to, computed from rows; see benchmarks/README.md.

A bar holds if its value is at least `least`, in every case that it applies to or, with `mean`, in
their geometric mean. Values are shares: how many times faster than a peer, or a part of a bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from benchmarks.report import Row, case_of


class Measured:
    """The rows of one case, by implementation."""

    def __init__(self, rows: list[Row]):
        self.by_name = {row["implementation"]: row for row in rows}
        self.first = rows[0]

    def __getattr__(self, field: str):
        return self.first[field]

    def ours(self, field: str):
        return self.by_name.get("ours", {}).get(field)

    def speedup(self, peer: str) -> float | None:
        """Time of a peer over ours; None where one of them has no time."""
        times = [self.by_name.get(name, {}).get("milliseconds") for name in (peer, "ours")]
        return times[0] / times[1] if all(times) else None

    def describe(self) -> str:
        return f"{self.direction} {self.dtype} {self.shape} {self.options}"


class Table:
    """All cases of some rows."""

    def __init__(self, rows: Iterable[Row]):
        groups: dict[tuple, list[Row]] = {}
        for row in rows:
            groups.setdefault(case_of(row), []).append(row)
        self.cases = [Measured(group) for group in groups.values()]

    def twin(self, case: Measured, options: str, same: tuple[str, ...]) -> Measured | None:
        """The case that differs in its options only."""
        for other in self.cases:
            if other.options == options and all(
                getattr(other, field) == getattr(case, field) for field in same
            ):
                return other
        return None


@dataclasses.dataclass(frozen=True)
class Bar:
    device: str
    text: str
    least: float
    applies: Callable[[Measured], bool]
    value: Callable[[Measured, Table], float | None]
    mean: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    bar: Bar
    value: float  # the geometric mean, or that of the worst case
    where: str  # the worst case
    passed: int
    cases: int

    @property
    def holds(self) -> bool:
        return self.value >= self.bar.least

    def __str__(self) -> str:
        word = "pass" if self.holds else "MISS"
        count = "" if self.bar.mean else f", {self.passed} of {self.cases} cases"
        worst = f"geometric mean of {self.cases}" if self.bar.mean else f"worst: {self.where}"
        text = f"{word}  {self.bar.text}: {self.value:.3g} (bar {self.bar.least:g}{count})"
        return f"{text}, {worst}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def evaluate(rows: Iterable[Row]) -> list[Verdict]:
    """A verdict for each bar that has something to judge."""
    table = Table(rows)
    verdicts = []
    for bar in BARS:
        found = []
        for case in table.cases:
            if case.device == bar.device and bar.applies(case):
                value = bar.value(case, table)
                if value is not None:
                    found.append((value, case.describe()))
        if found:
            values = [value for value, _ in found]
            worst, where = min(found)
            value = geometric_mean(values) if bar.mean else worst
            passed = sum(value >= bar.least for value in values)
            verdicts.append(Verdict(bar, value, where, passed, len(values)))
    return verdicts


# ---- What is compared ----------------------------------------------------------------------------

SHAPE = ("suite", "op", "direction", "dtype", "batch", "heads_q", "heads_kv", "len_q", "len_k")
SAME = (*SHAPE, "head_dim")


def faster_than(peer: str):
    return lambda case, table: case.speedup(peer)


def rate_of_full(case: Measured, table: Table) -> float | None:
    """Visible pairs a second, over those of the same call with all pairs visible."""
    return ratio(case.ours("tflops"), table.twin(case, "full", SAME), "tflops")


def rate_of_dense(case: Measured, table: Table) -> float | None:
    """Visible pairs a second of a packed call, over those of a dense one of as many tokens."""
    options = case.options.removeprefix("packed ") if " " in case.options else "full"
    same = ("suite", "direction", "dtype", "heads_q", "heads_kv", "head_dim")
    return ratio(case.ours("tflops"), table.twin(case, options, same), "tflops")


def speed_without_dropout(case: Measured, table: Table) -> float | None:
    plain = case.options.removesuffix("dropout 0.1").strip() or "full"
    return ratio(case.ours("tflops"), table.twin(case, plain, SAME), "tflops")


def ratio(value: float | None, twin: Measured | None, field: str) -> float | None:
    other = twin.ours(field) if twin else None
    return value / other if value and other else None


def gradient_error(case: Measured, table: Table) -> float | None:
    """Error of torch's math path over ours, of the gradient where that is smallest."""
    math_row = case.by_name.get("torch math", {})
    pairs = [
        (math_row.get(f"error_{n}"), case.ours(f"error_{n}")) for n in ("query", "key", "value")
    ]
    return min(theirs / own for theirs, own in pairs) if all(map(all, pairs)) else None


def share_of_copy(case: Measured, table: Table) -> float | None:
    copy = case.by_name.get("copy", {}).get("gbytes")
    own = case.ours("gbytes")
    return own / copy if own and copy else None


def share_of_bandwidth(case: Measured, table: Table) -> float | None:
    own = case.ours("gbytes")
    return own / case.copy_gbytes if own else None


def memory_of_math(case: Measured, table: Table) -> float | None:
    theirs = case.by_name.get("torch math", {}).get("extra_mib")
    own = case.ours("extra_mib")
    return theirs / own if own and theirs else None


def memory_of_shortest(case: Measured, table: Table) -> float | None:
    """Extra memory at the shortest length over that here; the number of tokens is the same."""
    same = ("suite", "direction", "dtype", "options", "head_dim")
    others = [c for c in table.cases if all(getattr(c, f) == getattr(case, f) for f in same)]
    shortest = min(others, key=lambda c: c.len_q)
    own, least = case.ours("extra_mib"), shortest.ours("extra_mib")
    return least / own if own and least and shortest is not case else None


# ---- The bars ------------------------------------------------------------------------------------


def suite(*names: str, **fields):
    def applies(case: Measured) -> bool:
        return case.suite in names and all(getattr(case, k) == v for k, v in fields.items())

    return applies


def options(word: str, *suites: str, **fields):
    within = suite(*(suites or ("options",)), **fields)
    return lambda case: within(case) and word in case.options


def long_fp32(case: Measured) -> bool:
    return suite("forward", "backward", dtype="fp32")(case) and case.len_q >= 1024


def half_seen(case: Measured) -> bool:
    in_grid = suite("forward", "backward", options="causal")(case)
    return in_grid or options("window", "options")(case)


def usual_rows(case: Measured) -> bool:
    return case.suite == "softmax" and 128 <= case.len_k <= 65536 and case.shape.count("x") == 1


def other_rows(case: Measured) -> bool:
    return case.suite == "softmax" and (case.len_k in (32, 2**18) or case.len_k >= 2**26)


FLASH = ("forward", "backward", "options")
BARS = (
    Bar("cpu", "forward, times torch", 1.3, suite("forward"), faster_than("torch"), mean=True),
    Bar("cpu", "backward, times torch", 1.5, suite("backward"), faster_than("torch"), mean=True),
    Bar("cpu", "every row, times torch", 0.95, suite("forward", "backward"), faster_than("torch")),
    Bar("cpu", "fp32 of 1024 rows and more, times torch", 0.98, long_fp32, faster_than("torch")),
    Bar("cpu", "causal and window, rate of the full row's", 0.85, half_seen, rate_of_full),
    # To three digits: at best both errors are those of rounding the exact result, ties aside.
    Bar("cpu", "bf16 gradients, error of torch's math path over ours", 0.999, suite("accuracy"),
        gradient_error),
    Bar("cpu", "training with dropout, times torch", 3.0, options("dropout"), faster_than("torch")),
    Bar("cpu", "training with a float mask, times torch", 2.0, options("float mask"),
        faster_than("torch")),
    Bar("cpu", "packed, rate of the dense row's", 0.9, options("packed"), rate_of_dense),
    Bar("cpu", "softmax, times torch", 1.0, suite("softmax"), faster_than("torch")),
    Bar("cuda", "softmax of 128 to 65,536, share of a copy", 0.95, usual_rows, share_of_copy),
    Bar("cuda", "softmax of other lengths, share of a copy", 0.85, other_rows, share_of_copy),
    Bar("cuda", "softmax, times torch", 1.0, suite("softmax"), faster_than("torch")),
    Bar("cuda", "naive, times torch math", 1.0, suite("naive"), faster_than("torch math")),
    Bar("cuda", "naive, memory of torch math over ours", 1 / 1.05, suite("naive"), memory_of_math),
    Bar("cuda", "forward and backward, times torch flash", 1.0, suite(*FLASH),
        faster_than("torch flash")),
    Bar("cuda", "masks, times torch efficient", 1.3, options("mask"),
        faster_than("torch efficient")),
    Bar("cuda", "fp32, times torch efficient", 1.5, suite("options", dtype="fp32"),
        faster_than("torch efficient")),
    Bar("cuda", "dropout, speed of that without", 1 / 1.2, options("dropout", head_dim=128),
        speed_without_dropout),
    Bar("cuda", "one row and 32k keys, share of the bandwidth", 0.6, suite("decode", len_k=32768),
        share_of_bandwidth),
    Bar("cuda", "extra memory at the shortest length over that at each", 1 / 1.5,
        suite("forward", "backward"), memory_of_shortest),
)  # fmt: skip
