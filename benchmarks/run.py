"""Measures the kernels of this package beside their peers, in one process.

    python -m benchmarks.run --suite forward backward --device cpu --threads 2

Each result is first held against the formula in fp64, on the tensors that are then timed. See
benchmarks/README.md for the table, the columns and the bars.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import attention, bars, check, machine, peers, report, roofline, softmax, suites
from benchmarks.timing import MOST_ROUNDS, Budget, Call, as_graph, interleave, timer_for

CONTENDERS = (*peers.PEERS, "copy")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    chosen = {name: select(name, options) for name in options.suite}
    if not any(chosen.values()):
        sys.exit("benchmarks: no case is left by --only")
    if options.list:
        print(*(f"{name:8} {case.label}" for name in chosen for case in chosen[name]), sep="\n")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks: no GPU, or torch was built without CUDA")
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")  # torch says by warnings why a back end cannot run
    about = machine.describe(options.device, options.commit)
    dtypes = sorted({case.dtype for cases in chosen.values() for case in cases})
    print(", ".join(f"{key} {value}" for key, value in about.items() if value))
    keeps = options.append and options.output and options.output.exists()
    kept = report.read_csv(options.output) if keeps else []
    rows, failures = [], []
    for name, cases in chosen.items():
        # Anew for each suite: they say whether the machine is still the same.
        ceilings = roofline.measure(options.device, dtypes, quick=options.tiny)
        print_ceilings(name, ceilings)
        seconds = options.budget or suites.BUDGETS[options.device][name]
        with report.Progress(name, len(cases)) as progress:
            budget = Budget(seconds, len(cases))
            for case in cases:
                share = budget.share()
                if share <= 0:
                    progress.step(f"{case.label}: no time left, see --budget")
                    continue
                found = measure(case, options, ceilings, share)
                progress.step(report.table_line(found))
                failures += [row for row in found if is_failure(row)]
                rows += [row | machine_columns(about, ceilings, case.dtype) for row in found]
        if options.output:
            report.write_csv(options.output, report.joined(kept, rows))
    print_verdicts(rows)
    for row in failures:
        print(f"FAILED: {row['direction']} {row['dtype']} {row['shape']} {row['options']}: "
              f"{row['note']}")  # fmt: skip
    return bool(failures)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted({name for table in suites.SUITES.values() for name in table})
    parser.add_argument("--suite", nargs="+", choices=names, help="default: all of the device")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--budget", type=float, help="seconds for each suite")
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="of a case, at most")
    parser.add_argument("--only", help="regular expression that a case's label must contain")
    parser.add_argument("--peers", nargs="+", choices=CONTENDERS, help="ours is always there")
    parser.add_argument("--output", type=Path, help="CSV file")
    parser.add_argument("--append", action="store_true", help="keep the file's other cases")
    parser.add_argument("--commit", help="for the rows, where there is no git")
    parser.add_argument("--list", action="store_true", help="the labels of the cases, and end")
    parser.add_argument("--tiny", action="store_true", help="the same kinds of problems, tiny")
    options = parser.parse_args(arguments)
    options.suite = options.suite or list(suites.SUITES[options.device])
    missing = [name for name in options.suite if name not in suites.SUITES[options.device]]
    if missing:
        parser.error(f"--device {options.device} has no suite {', '.join(missing)}")
    return options


def select(name: str, options: argparse.Namespace) -> list:
    cases = suites.suite(name, options.device, options.tiny)
    return [case for case in cases if not options.only or re.search(options.only, case.label)]


def is_failure(row: report.Row) -> bool:
    """Ours must be right; that it has no kernel yet is no failure."""
    return row["implementation"] == "ours" and str(row["note"]).startswith(("wrong", "error"))


# ---- One case ------------------------------------------------------------------------------------


def measure(case, options: argparse.Namespace, ceilings, seconds: float) -> list[report.Row]:
    """The rows of a case: one for each implementation, timed or with a note why not."""
    is_softmax = isinstance(case, softmax.Softmax)
    device = options.device
    names = ["ours", "torch", "copy"] if is_softmax else peers.peers_for(case, device)
    names = [n for n in names if not options.peers or n in (*options.peers, "ours")]
    prepare = prepare_softmax if is_softmax else prepare_attention
    end = time.perf_counter() + seconds
    rows, calls, counts = prepare(case, device, names)
    left = end - time.perf_counter()
    times = interleave(calls, timer_for(device), left, options.rounds) if calls else {}
    bound = ceilings.bound(*counts, case.dtype)
    for row in rows:
        timing = times.get(row["implementation"])
        if timing is None:
            continue
        flops, moved = counts
        if row["implementation"] == "copy":
            flops, moved = 0.0, moved * 2 / case.moved
        row |= {
            "milliseconds": timing.seconds * 1e3,
            "spread": timing.spread,
            "rounds": timing.rounds,
            "bound_milliseconds": bound * 1e3,
            "share_of_bound": bound / timing.seconds,
            "tflops": flops / timing.seconds / 1e12,
            "gbytes": moved / timing.seconds / 1e9,
        }
        if "ours" in times:
            row["times_ours"] = timing.seconds / times["ours"].seconds
    return rows


def new_row(case, device: str, name: str) -> report.Row:
    row: report.Row = dict.fromkeys(report.CASE_FIELDS)
    row |= {"suite": case.suite, "device": device, "op": case.op}
    row |= {"direction": case.direction, "dtype": case.dtype} | case.columns()
    return row | {"implementation": name, "kernel": "", "note": ""}


def prepare_attention(case, device: str, names: list[str]):
    """(rows, calls by name, counts): every call has run once, and gave the right result."""
    tensors = attention.make_tensors(case, device)
    exact = check.ExactResults(case, tensors)
    rows, calls = [], {}
    for name in names:
        row = new_row(case, device, name)
        rows.append(row)

        def run(name=name, row=row) -> Call:
            attend = peers.PEERS[name](case, tensors)
            call, results = start(case, tensors, attend)
            # Each library has dropout bits of its own: only ours are known here.
            if not case.dropout_p or name == "ours":
                errors = exact.errors(results)
                row.update({f"error_{k}": error for k, error in errors.items()})
                judge(max(errors.values()), case.dtype)
            if name == "ours":
                row["kernel"] = peers.kernel_of_ours(case, tensors)
            if device == "cuda":
                row["extra_mib"] = extra_mib(call)
                call = as_graph(call) if case.suite == "decode" else call
            return call

        call = try_to(run, row)
        if call is not None:
            calls[name] = call
    return rows, calls, case.counts(tensors)


def start(case, tensors, attend: Call) -> tuple[Call, dict]:
    """The call to time, and the results to check."""
    if not case.trains:
        with torch.no_grad():
            out = attend()

        def forward():
            with torch.no_grad():
                return attend()

        return forward, {"out": out}
    inputs = tensors.inputs()
    out = attend()

    def gradients(of):
        return torch.autograd.grad(of, list(inputs.values()), tensors.grad_out, retain_graph=True)

    results = {"out": out} | dict(zip(inputs, gradients(out), strict=True))
    if case.direction == "backward":
        return lambda: gradients(out), results
    return lambda: torch.autograd.grad(attend(), list(inputs.values()), tensors.grad_out), results


def prepare_softmax(case, device: str, names: list[str]):
    tensors = softmax.make_softmax_tensors(case, device)
    rows, calls = [], {}
    for name in names:
        row = new_row(case, device, name)
        rows.append(row)

        def run(name=name, row=row) -> Call:
            call = softmax.softmax_call(name, case, tensors)
            got = call()
            if name != "copy":
                row["error_out"], rounding = softmax.softmax_error(case, tensors, got)
                judge(row["error_out"], case.dtype, rounding)
            return call

        call = try_to(run, row)
        if call is not None:
            calls[name] = call
    return rows, calls, case.counts(tensors)


def judge(error: float, dtype: str, rounding: float = 0.0) -> None:
    if not error <= check.LIMITS[dtype] + rounding:  # NaN is wrong too
        raise ValueError(f"wrong result: relative error {error:.2g}")


def try_to(run: Callable[[], Call], row: report.Row) -> Call | None:
    """The call, or None and the reason in the row's note."""
    try:
        return run()
    except peers.SkippedError as reason:
        row["note"] = f"skipped: {reason}"
    except ValueError as wrong:
        row["note"] = str(wrong)
    except Exception as error:  # whatever a library raises for a problem that it cannot take
        first_line = (str(error) or type(error).__name__).strip().split("\n")[0]
        row["note"] = f"error: {report.short(first_line, 120)}"
    return None


def extra_mib(call: Call) -> float:
    """Device memory that a call needs at its peak, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# ---- What surrounds the table --------------------------------------------------------------------


def machine_columns(about: dict, ceilings, dtype: str) -> report.Row:
    return about | {
        "clock_mhz": ceilings.clock_mhz,
        "peak_tflops": ceilings.flops[dtype] / 1e12,
        "peak_unit": ceilings.unit[dtype],
        "control_tflops": ceilings.control[dtype] / 1e12,
        "copy_gbytes": ceilings.bandwidth / 1e9,
    }


def print_ceilings(name: str, ceilings) -> None:
    rates = [
        f"{dtype} {flops / 1e12:.3g} TFLOP/s ({ceilings.unit[dtype]}), matrix product "
        f"{ceilings.control[dtype] / 1e12:.3g}"
        for dtype, flops in ceilings.flops.items()
    ]
    memory = f"copy {ceilings.bandwidth / 1e9:.4g} GB/s, clock {ceilings.clock_mhz} MHz"
    print(f"\n{name}: ceilings " + "; ".join([*rates, memory]), flush=True)


def print_verdicts(rows: list[report.Row]) -> None:
    verdicts = bars.evaluate(rows)
    for line in disturbances(rows):
        print(f"\nWARNING: {line}")
    print("\n" + "\n".join(map(str, verdicts)) if verdicts else "\nno bar has a value")


def disturbances(rows: list[report.Row]) -> list[str]:
    """Suites during which the machine was slower than during another one."""
    control: dict[str, dict[str, float]] = {}
    for row in rows:
        control.setdefault(row["dtype"], {})[row["suite"]] = row["control_tflops"]
    return [
        f"during {name} the {dtype} matrix product reached {rate / max(rates.values()):.0%} of its "
        "best: another process, or a throttled clock"
        for dtype, rates in control.items()
        for name, rate in rates.items()
        if rate < 0.85 * max(rates.values())
    ]


if __name__ == "__main__":
    sys.exit(main())
