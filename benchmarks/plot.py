"""Draws the rows in benchmarks/results as SVGs beside them, and writes the pages about them.

    python -m benchmarks.plot

Needs matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import summary
from benchmarks.bars import Measured, Table
from benchmarks.counts import BYTES
from benchmarks.report import Row, read_csv

COLORS = {
    "ours": "#c1272d", "torch": "#4d4d4d", "torch math": "#b3b3b3", "torch flash": "#4d4d4d",
    "torch efficient": "#8c8c8c", "torch cudnn": "#0071bc", "fa3": "#22885a", "fa4": "#93b800",
    "flex": "#8a5fbf", "copy": "#c9c9c9",
}  # fmt: skip
STYLES = {"full": "-", "causal": "--", "dim 1 of 2": "-", "dim 0 of 2": "--"}
LEGEND = 1.9  # inches
DRAWN = ("softmax", "naive", "forward", "backward")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.parse_args(arguments)
    for path in summary.result_files():
        for picture in draw_file(path, summary.RESULTS):
            print(picture)
    print(*summary.write_pages(), sep="\n")
    return 0


def draw_file(path: Path, folder: Path) -> list[Path]:
    """One SVG for each suite and direction of a file that has a picture."""
    drawn = []
    rows = read_csv(path)
    keys = {(r["suite"], r["direction"]): None for r in rows if r["suite"] in DRAWN}
    for suite, direction in keys:
        chosen = [r for r in rows if (r["suite"], r["direction"]) == (suite, direction)]
        name = suite if suite == direction else f"{suite}-{direction}"
        target = folder / f"{path.stem}-{name}.svg"
        if draw(chosen, f"{suite} {direction}" if suite != direction else suite, target):
            drawn.append(target)
    return drawn


def draw(rows: list[Row], title: str, target: Path) -> bool:
    """A panel for each dtype and head dim: rate over length, a line for each implementation."""
    panels: dict[tuple, list[Measured]] = {}
    for case in Table(rows).cases:
        if case.options in STYLES and case.len_q != 1:
            panels.setdefault((case.dtype, case.head_dim), []).append(case)
    if not panels:
        return False
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.4 * len(panels) + LEGEND, 3.2), squeeze=False, sharey=False
    )
    for axis, (key, cases) in zip(axes[0], sorted(panels.items(), key=panel_order), strict=True):
        draw_panel(axis, cases)
        dtype, head_dim = key
        axis.set_title(f"{dtype}, head dim {head_dim}" if head_dim else dtype, fontsize=9)
    about = rows[0]
    figure.suptitle(f"{title}: {about['machine']}, {about['instruction_set']}, "
                    f"commit {about['commit']}", fontsize=9)  # fmt: skip
    handles = {h.get_label(): h for a in axes[0] for h in a.get_lines() if h.get_label()[0] != "_"}
    figure.legend(handles.values(), handles, loc="center right", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - LEGEND / figure.get_size_inches()[0], 1))
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    return True


def panel_order(item) -> tuple:
    (dtype, head_dim), _ = item
    return list(BYTES).index(dtype), head_dim or 0


def draw_panel(axis, cases: list[Measured]) -> None:
    """Of several numbers of heads, the largest is drawn."""
    in_bytes = not cases[0].head_dim
    field = "gbytes" if in_bytes else "tflops"
    lines: dict[tuple, dict[int, tuple[int, float]]] = {}
    for case in cases:
        for name, row in case.by_name.items():
            if row[field]:
                points = lines.setdefault((name, case.options), {})
                heads = (case.batch or 0) * (case.heads_q or 0)
                before = points.get(case.len_k, (-1, 0.0))
                points[case.len_k] = max(before, (heads, row[field]))
    for (name, options), points in lines.items():
        lengths = sorted(points)
        axis.plot(
            lengths,
            [points[n][1] for n in lengths],
            STYLES[options],
            color=COLORS.get(name, "#000000"),
            marker="o",
            markersize=3,
            linewidth=2 if name == "ours" else 1.2,
            label=name if STYLES[options] == "-" else f"{name}, {options}",
            zorder=3 if name == "ours" else 2,
        )
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("row length" if in_bytes else "sequence length", fontsize=8)
    axis.set_ylabel("GB/s" if in_bytes else "TFLOP/s", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25)


def pyplot():
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flashattn_ext"  # the same rows, the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    return plt


if __name__ == "__main__":
    sys.exit(main())
