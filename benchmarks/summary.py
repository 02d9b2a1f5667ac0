"""What the committed rows say, in words: benchmarks/results/README.md, and in the front page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.bars import Measured, Table, evaluate, geometric_mean
from benchmarks.report import MACHINE_FIELDS, Row, read_csv

RESULTS = Path(__file__).with_name("results")
HEAD = """\
# Results

Drawn by `python -m benchmarks.plot` from the rows of the CSV files here;
[how they were measured](../README.md). A rate counts visible pairs only. "Times" are a peer's time
over ours: above 1, ours is faster.
"""


def result_files() -> list[Path]:
    """One or more for each device: cpu.csv, cuda.csv, ..."""
    return sorted(RESULTS.glob("cpu*.csv")) + sorted(RESULTS.glob("cuda*.csv"))


def summary(tables: dict[str, list[Row]], pictures: dict[str, list[str]]) -> str:
    """The page, of rows by file name; pictures: the SVGs of a file."""
    parts = [HEAD]
    for name, rows in tables.items():
        lines = [f"## {name}", "", *machines(rows), ""]
        lines += [f"![{picture}]({picture})" for picture in pictures.get(name, [])] + [""]
        lines += [*bar_lines(rows), "", *group_lines(rows), ""]
        parts.append("\n".join(lines))
    return "\n".join(parts).rstrip("\n") + "\n"


def machines(rows: list[Row]) -> list[str]:
    """One line for each machine and commit that the rows come from."""
    shown = MACHINE_FIELDS[: MACHINE_FIELDS.index("clock_mhz")]
    found = {tuple((field, row[field]) for field in shown if row[field]): None for row in rows}
    lines = [", ".join(f"{field} {value}" for field, value in about) for about in found]
    return [f"* {line}" for line in lines] + [""] + [*ceilings(rows)]


def ceilings(rows: list[Row]) -> Iterable[str]:
    peaks = {(r["dtype"], r["peak_unit"]): r["peak_tflops"] for r in rows}
    yield (
        "Peaks of that run: "
        + "; ".join(
            f"{dtype} {peak:.3g} TFLOP/s ({unit})" for (dtype, unit), peak in sorted(peaks.items())
        )
        + f"; copy {rows[0]['copy_gbytes']:.4g} GB/s; clock {rows[0]['clock_mhz']} MHz."
    )


def bar_lines(rows: list[Row]) -> list[str]:
    lines = ["| bar | at least | measured | cases | worst case |", "|---|---|---|---|---|"]
    for verdict in evaluate(rows):
        bar = verdict.bar
        count = "geometric mean" if bar.mean else f"{verdict.passed} of {verdict.cases}"
        value = f"{verdict.value:.3g}" if verdict.holds else f"**{verdict.value:.3g}**"
        where = "" if bar.mean else verdict.where
        lines.append(cells((bar.text, f"{bar.least:.3g}", value, count, where)))
    return lines


def group_lines(rows: list[Row], fields=("suite", "direction", "dtype", "options")) -> list[str]:
    """Our best rate, and geometric means over peers, of all cases that are equal in some fields."""
    groups: dict[tuple, list[Measured]] = {}
    for case in Table(rows).cases:
        if case.ours("milliseconds"):
            groups.setdefault(tuple(getattr(case, f) for f in fields), []).append(case)
    heads = (*fields, "cases", "best rate", "of the bound", "times peers (geometric mean)")
    lines = [cells(heads), "|---" * len(heads) + "|"]
    for key, cases in groups.items():
        share = max(case.ours("share_of_bound") for case in cases)
        peers = ", ".join(f"{name} {value:.2f}" for name, value in peer_means(cases).items())
        lines.append(cells((*key, len(cases), best_rate(cases), f"{share:.0%}", peers)))
    return lines


def cells(values: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def best_rate(cases: list[Measured]) -> str:
    tflops = max(case.ours("tflops") for case in cases)
    if tflops == 0:
        return f"{max(case.ours('gbytes') for case in cases):.4g} GB/s"
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:.3g} GFLOP/s"


def peer_means(cases: list[Measured]) -> dict[str, float]:
    names = {name: None for case in cases for name in case.by_name if name != "ours"}
    means = {}
    for name in names:
        found = [value for case in cases if (value := case.speedup(name))]
        if found:
            means[name] = geometric_mean(found)
    return means


def pictures_of(path: Path) -> list[str]:
    return sorted(picture.name for picture in RESULTS.glob(f"{path.stem}-*.svg"))


# ---- The section of the front page ---------------------------------------------------------------

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- speed: written by benchmarks.plot -->", "<!-- end of speed -->"
SHOWN = ("forward", "backward", "softmax-forward")
SUITES_SHOWN = ("forward", "backward", "softmax", "naive")


def front_section(tables: dict[str, list[Row]]) -> str:
    """What stands between the marks in the README: a table and pictures for each file of rows."""
    parts = []
    for name, rows in tables.items():
        stem = Path(name).stem
        pictures = [f"{stem}-{shown}.svg" for shown in SHOWN]
        chosen = [row for row in rows if row["suite"] in SUITES_SHOWN]
        lines = [*machines(rows)[:-1], "", *group_lines(chosen, ("suite", "direction")), ""]
        lines += [f"![{p}](benchmarks/results/{p})" for p in pictures if (RESULTS / p).exists()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "No rows are committed yet."


def with_section(page: str, section: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def write_pages() -> list[Path]:
    """The page of the results and the section of the front page, of the files as they are."""
    files = result_files()
    tables = {path.name: read_csv(path) for path in files}
    page = RESULTS / "README.md"
    if files:
        page.write_text(summary(tables, {path.name: pictures_of(path) for path in files}))
    README.write_text(with_section(README.read_text(), front_section(tables)))
    return [page, README]
