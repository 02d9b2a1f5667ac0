"""Registers, shared memory and spills of every CUDA kernel, held to benchmarks/budgets.csv.

    python benchmarks/kernel_resources.py            fails where a kernel spills or needs more
    python benchmarks/kernel_resources.py --update   writes what it finds as the new budgets

Needs nvcc and a configured build, no GPU: each .cu of its compile_commands.json is compiled once
more, for one architecture at a time, with ptxas told to report. A kernel here is a function
template; its numbers are the largest of its instances. Registers are handed out in eights, so a
budget is a multiple of eight. local_bytes is what spills: 0, unless somebody argued for more.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = ROOT / "benchmarks" / "budgets.csv"
FIELDS = ("architecture", "kernel", "registers", "static_shared_bytes", "local_bytes")

REPORT = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)' for '\w+'"
    r"(?:(?!Compiling entry).)*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill"
    r"(?:(?!Compiling entry).)*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "setup")
    parser.add_argument("--architectures", nargs="+", default=["80", "90a"])
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()

    commands = cuda_commands(arguments.tree)
    jobs = [(command, arch) for command in commands for arch in arguments.architectures]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2))) as pool:
        reports = list(pool.map(lambda job: compile_one(*job), jobs))
    found = gather(reports)

    for (arch, kernel), (registers, shared, local) in sorted(found.items()):
        note = f"  {local} bytes of local memory" if local else ""
        print(f"sm_{arch:4} {registers:4} registers {shared:7} bytes shared  {kernel}{note}")
    if arguments.update:
        write_budgets(found, arguments.architectures)
    wrong = problems(found, read_budgets())
    print("\n".join(wrong) or f"{len(found)} kernels within their budgets")
    return bool(wrong)


def cuda_commands(tree: Path) -> list[list[str]]:
    """nvcc's command lines of a build, without output, architectures and compiler cache."""
    database = tree / "compile_commands.json"
    if not database.exists():
        sys.exit(f"{database} not found: build first (make build), or pass --tree")
    commands = []
    for entry in json.loads(database.read_text()):
        if entry["file"].endswith(".cu"):
            words = shlex.split(entry["command"])
            while Path(words[0]).name != "nvcc":  # ccache
                words = words[1:]
            words = [word for word in words if not word.startswith("--generate-code")]
            output = words.index("-o")
            commands.append(words[:output] + words[output + 2 :])
    if not commands:
        sys.exit(f"{database} has no CUDA sources: was nvcc found?")
    return commands


def compile_one(command: list[str], architecture: str) -> tuple[str, str]:
    """(architecture, ptxas's report) of one source."""
    with tempfile.TemporaryDirectory() as folder:
        command = [word for word in command if word != "-c"]
        command += [f"-arch=sm_{architecture}", "-cubin", "-Xptxas=-v", "-o", f"{folder}/out.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{done.stderr}")
    return architecture, done.stdout + done.stderr


def gather(reports: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(architecture, kernel) -> registers, bytes of static shared memory, bytes of local memory."""
    instances = []
    for architecture, text in reports:
        for match in REPORT.finditer(text):
            shared = re.search(r"(\d+) bytes smem", match["rest"])
            local = max(int(match["stack"]), int(match["stores"]))
            numbers = (int(match["registers"]), int(shared[1]) if shared else 0, local)
            instances.append((architecture, match["symbol"], numbers))
    names = demangle([symbol for _, symbol, _ in instances])
    found: dict = defaultdict(lambda: (0, 0, 0))
    for (architecture, _, numbers), name in zip(instances, names, strict=True):
        key = (architecture, name)
        found[key] = tuple(map(max, found[key], numbers))
    return dict(found)


def demangle(symbols: list[str]) -> list[str]:
    """The kernels' names without return type, namespace, template arguments and parameters."""
    done = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return [kernel_name(line) for line in done.stdout.splitlines()]


def kernel_name(signature: str) -> str:
    """The last name outside all brackets: `void a::(anonymous namespace)::f<T>(int)` -> `f`."""
    signature = signature.replace("(anonymous namespace)::", "")
    plain, depth = "", 0
    for character in signature:
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth -= 1
        elif depth == 0:
            plain += character
    return plain.split()[-1].split("::")[-1]


def problems(found: dict, budgets: dict) -> list[str]:
    wrong = []
    for (arch, kernel), (registers, shared, local) in sorted(found.items()):
        where = f"{kernel} for sm_{arch}"
        if (arch, kernel) not in budgets:
            wrong.append(f"{where}: no budget; add one with --update")
            continue
        most_registers, most_shared, most_local = budgets[arch, kernel]
        if local > most_local:
            wrong.append(f"{where}: {local} bytes of local memory, budget {most_local}")
        if registers > most_registers:
            wrong.append(f"{where}: {registers} registers, budget {most_registers}")
        if shared > most_shared:
            wrong.append(f"{where}: {shared} bytes of shared memory, budget {most_shared}")
    measured = {arch for arch, _ in found}
    gone = [key for key in budgets if key[0] in measured and key not in found]
    wrong += [
        f"{kernel} for sm_{arch}: in the budgets, but no such kernel" for arch, kernel in gone
    ]
    return wrong


def read_budgets() -> dict[tuple[str, str], tuple[int, int, int]]:
    if not BUDGETS.exists():
        return {}
    with BUDGETS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["architecture"], row["kernel"]): (
            int(row["registers"]),
            int(row["static_shared_bytes"]),
            int(row["local_bytes"]),
        )
        for row in rows
    }


def write_budgets(found: dict, architectures: list[str]) -> None:
    kept = {key: value for key, value in read_budgets().items() if key[0] not in architectures}
    new = {key: (-(-numbers[0] // 8) * 8, *numbers[1:]) for key, numbers in found.items()}
    with BUDGETS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for key, numbers in sorted({**kept, **new}.items()):
            writer.writerow([*key, *numbers])


if __name__ == "__main__":
    sys.exit(main())
