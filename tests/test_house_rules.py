"""The rules of the house that a machine can check; CONTRIBUTING.md has them all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402

CPP = (".h", ".cpp", ".cuh", ".cu")
TEXT = (*CPP, ".py", ".md", ".txt", ".toml", ".yaml", ".json", ".cmake", ".sh", ".map", ".csv", "")

# Files that are longer than the aim, and why each is one thing.
LONG_FILES: dict[str, str] = {}
MOST_LINES = 400
LONGEST_LINE = 100

# core/ headers without a test of their own name.
UNTESTED_CORE = {
    "constants.h": "numbers; every test uses them",
    "host_device.h": "one macro",
}

# Public modules and ops that other tests cover than one of their name.
TESTED_ELSEWHERE: dict[str, str] = {}


def repository_files() -> list[str]:
    """What is or could be committed, as paths from the root; an sdist has no git to ask."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout", allow_module_level=True)
    return sorted(path for path in listing.stdout.split("\n") if (ROOT / path).is_file())


FILES = repository_files()


def files(folder: str, *suffixes: str) -> list[str]:
    return [f for f in FILES if f.startswith(folder) and (not suffixes or f.endswith(suffixes))]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|R"\(.*?\)"|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def code(path: str) -> str:
    """C++ without comments and without the insides of strings, lines kept in place."""

    def blank(found: re.Match) -> str:
        keep = '""' if found[0].startswith(('"', "R")) else ""
        return keep + "\n" * found[0].count("\n")

    # An include in quotes is code.
    text = re.sub(r'#include "([^"]+)"', r"#include <\1>", read(path))
    return COMMENT_OR_STRING.sub(blank, text)


def places(paths: list[str], pattern: str, text: Callable[[str], str] = read) -> list[str]:
    """Every match as "path:line: the line"."""
    regex = re.compile(pattern)
    found = []
    for path in paths:
        content = text(path)
        lines = content.split("\n")
        for match in regex.finditer(content):
            number = content.count("\n", 0, match.start())
            found.append(f"{path}:{number + 1}: {lines[number].strip()}")
    return found


def outside(paths: list[str], *folders: str) -> list[str]:
    return [path for path in paths if not path.startswith(folders)]


def report(found: list[str], rule: str) -> None:
    assert not found, rule + "\n  " + "\n  ".join(found)


CSRC = files("csrc/", *CPP)


# --- Who may include what -------------------------------------------------------------------------


def test_torch_stays_in_its_rooms():
    elsewhere = outside(CSRC, "csrc/ops/", "csrc/eager/")
    report(
        places(
            elsewhere, r"#include <(torch|ATen|c10|pybind11|Python\.h)|\b(torch|at|c10)::", code
        ),
        "torch belongs to csrc/ops and csrc/eager only",
    )


def test_ops_use_the_stable_abi_only():
    stable = r"torch/csrc/stable/|torch/headeronly/|torch/csrc/inductor/aoti_torch/c/"
    classic = rf"#include <(?!{stable})(torch|ATen|c10|pybind11)|\b(at|c10)::"
    report(
        places(outside(CSRC, "csrc/eager/"), classic, code),
        "classic torch headers and at::, c10:: belong to csrc/eager only",
    )


def test_core_is_plain_cpp():
    text = "\n".join(places(files("csrc/core/", *CPP), r"#include <[^>]+>", code))
    allowed = r"<c[a-z]+>|<limits>|<core/\w+\.h>|<cuda_(bf16|fp16)\.h>"
    report(
        [line for line in text.split("\n") if line and not re.search(allowed, line)],
        "core/ includes the C headers of the language, <limits> and itself",
    )


def test_rooms_of_the_kernels_do_not_reach_back():
    report(
        places(files("csrc/core/"), r"#include <(ops|cpu|cuda|eager)/", code)
        + places(files("csrc/cpu/"), r"#include <(ops|cuda|eager)/", code)
        + places(files("csrc/cuda/"), r"#include <(ops|cpu|eager)/", code)
        + places(files("csrc/cuda/ptx/"), r"#include <cuda/(?!ptx/)", code),
        "core knows nobody, cpu and cuda know core, ptx knows itself",
    )


def test_inline_assembly_has_one_room():
    report(
        places(outside(CSRC, "csrc/cuda/ptx/"), r"\b(asm|__asm__)\b", code),
        "inline assembly belongs to csrc/cuda/ptx",
    )


def test_schemas_are_in_one_block():
    paths = [path for path in CSRC if path != "csrc/ops/schema.cpp"]
    report(places(paths, r"\.def\(|TORCH_LIBRARY\(", code), "schemas belong to csrc/ops/schema.cpp")


# --- What no code may do --------------------------------------------------------------------------


def test_a_library_neither_ends_the_process_nor_prints():
    ends = r"(?<![\w.>])(std::)?(exit|_exit|quick_exit|abort|terminate)\s*\("
    prints = r"\b(std::)?(v|f)?(printf|puts|putchar)\s*\(|\bstd::(cout|cerr|clog)\b"
    report(places(CSRC, f"{ends}|{prints}", code), "errors are exceptions, and nothing prints")


def test_no_python_module_prints_but_the_tools():
    report(
        places(files("flashattn_ext/", ".py"), r"(?<![\w.`])print\("), "the package does not print"
    )


def test_nothing_waits_for_the_device():
    report(
        places(CSRC, r"\bcuda(Device|Stream|Event)Synchronize\b|\bcudaMemcpy\b|\bcudaFree\b", code),
        "an op never waits for the GPU",
    )


def test_threads_are_the_hosts():
    report(
        places(CSRC, r"\bstd::j?thread\b|\bstd::async\b|#pragma omp|\bpthread_create\b", code),
        "threads come from torch, through cpu/parallel.h",
    )


def test_no_fast_math():
    paths = ["CMakeLists.txt", *files("cmake/"), "setup.py"]
    report(
        places(paths, r"-ffast-math|-Ofast|-funsafe-math|use_fast_math|-ffinite-math"),
        "NaN and infinity have meanings here",
    )


def test_no_work_is_left_in_comments():
    paths = [*CSRC, *files("flashattn_ext/"), *files("tests/"), *files("examples/")]
    words = "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
    report(places(paths, rf"\b({words})\b"), "open work is an issue, not a comment")


# --- Shapes of kernels ----------------------------------------------------------------------------


def template_parameters(path: str) -> Iterator[tuple[int, list[str], str]]:
    """(line, parameters, what follows) of each template in a file."""
    text = code(path)
    for found in re.finditer(r"\btemplate\s*<", text):
        depth, at, parts = 1, found.end(), [""]
        while depth and at < len(text):
            character = text[at]
            depth += {"<": 1, ">": -1}.get(character, 0)
            if depth == 1 and character == ",":
                parts.append("")
            elif depth:
                parts[-1] += character
            at += 1
        parameters = [part.strip() for part in parts if part.strip()]
        yield text.count("\n", 0, found.start()) + 1, parameters, text[at : at + 200]


def test_modes_are_not_booleans():
    found = [
        f"{path}:{line}: {parameter}"
        for path in CSRC
        for line, parameters, _ in template_parameters(path)
        for parameter in parameters
        if re.match(r"(const\s+)?bool\b", parameter)
    ]
    report(found, "a mode is an enum class or a named type, never a boolean template parameter")


def test_kernels_have_at_most_four_template_parameters():
    found = [
        f"{path}:{line}: {', '.join(parameters)}"
        for path in CSRC
        for line, parameters, after in template_parameters(path)
        if re.match(r"\s*(static\s+)?__global__", after) and len(parameters) > 4
    ]
    report(found, "a kernel has at most four template parameters: policies are named types")


def test_headers_say_what_they_are():
    found = []
    for path in files("csrc/", ".h", ".cuh"):
        if not re.match(r"(//[^\n]*\n)+#pragma once\n", read(path)):
            found.append(path)
    report(found, "a header begins with a comment that says what it is, then #pragma once")


# --- Sizes ----------------------------------------------------------------------------------------


def test_lines_are_short():
    paths = [path for path in FILES if path.endswith((*CPP, ".py", ".sh", ".cmake"))]
    report(places(paths, rf"(?m)^.{{{LONGEST_LINE + 1},}}$"), f"lines of at most {LONGEST_LINE}")


def test_files_are_one_thing():
    paths = [path for path in FILES if path.endswith((*CPP, ".py"))]
    lines = {path: read(path).count("\n") for path in paths}
    report(
        [f"{p}: {n}" for p, n in lines.items() if n > MOST_LINES and p not in LONG_FILES],
        f"files of at most {MOST_LINES} lines; a longer one is named in LONG_FILES with its reason",
    )
    report([p for p in LONG_FILES if lines.get(p, 0) <= MOST_LINES], "LONG_FILES names short files")


# --- Tests mirror the source ----------------------------------------------------------------------


def test_every_core_header_has_its_test():
    headers = {Path(path).name for path in files("csrc/core/", ".h")}
    tested = {Path(path).name.replace("_test.cpp", ".h") for path in files("tests/core/", ".cpp")}
    assert headers - tested == set(UNTESTED_CORE), "core/X.h is tested by tests/core/X_test.cpp"
    assert tested <= headers, "tests/core/X_test.cpp tests core/X.h"


def test_every_cpp_test_has_its_source():
    found = []
    for path in files("tests/", "_test.cpp"):
        room, name = Path(path).parts[1], Path(path).name.removesuffix("_test.cpp")
        if not any(Path(source).stem == name for source in files(f"csrc/{room}/")):
            found.append(path)
    report(found, "tests/<room>/X_test.cpp tests X of csrc/<room>")


def test_every_public_name_has_its_test():
    sources = [f for f in files("flashattn_ext/", ".py") if not Path(f).name.startswith("_")]
    sources += [f for f in files("csrc/ops/", ".cpp") if "STABLE_TORCH_LIBRARY_IMPL" in read(f)]
    tests = [Path(path).stem for path in files("tests/", ".py")]
    missing = [
        source
        for source in sources
        if not any(test.startswith(f"test_{Path(source).stem}") for test in tests)
        and source not in TESTED_ELSEWHERE
    ]
    report(missing, "X.py and ops/X.cpp are tested by a test_X*.py, or named in TESTED_ELSEWHERE")
    report([f for f in TESTED_ELSEWHERE if f not in sources], "TESTED_ELSEWHERE names no source")


# --- Words ----------------------------------------------------------------------------------------

# Pieces are joined here so that this file does not break its own rule.
PRIVATE_WORDS = [
    "/wor" + "k/",
    "/tm" + "p/venv",
    "/roo" + "t/",
    r"/hom" + r"e/\w",
    r"pypi\." + "org",
    "python" + "hosted",
    r"deb\." + "debian",
    r"\b(AI|coding) assist" + "ant",
    r"\bas an assist" + "ant",
    "work" + "place",
    r"\bthe bri" + r"ef\b",
    r"\bthe le" + r"ad\b(?! to)",
    r"[Cc]o-[Aa]uthor" + "ed-[Bb]y",
    r"[Gg]enerat" + "ed (by|with) (a |an )?(AI|tool|model)",
]


def test_no_private_paths_or_words():
    paths = [path for path in FILES if Path(path).suffix in TEXT]
    report(places(paths, "|".join(PRIVATE_WORDS)), "no machine's paths, no hosts, no talk of tools")


def test_no_large_or_built_files():
    found = [path for path in FILES if (ROOT / path).stat().st_size > 1_000_000]
    found += [
        path for path in FILES if path.endswith((".so", ".o", ".a", ".whl", ".pyc", ".cubin"))
    ]
    report(found, "nothing built and nothing above 1 MB is committed")


def test_changelog_has_a_place_for_the_next_change():
    section = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", read("CHANGELOG.md"), re.M | re.S)
    assert section, "CHANGELOG.md has a section `## Unreleased`"
    assert re.search(r"^- ", section[1], re.M), "and says there what users will notice"


def test_licence_is_the_one_that_is_declared():
    text = read("LICENSE")
    assert text.startswith("BSD 3-Clause License")
    assert "flashattn_ext contributors" in text
    assert 'license = "BSD-3-Clause"' in read("pyproject.toml")


# --- core/ compiles alone -------------------------------------------------------------------------

CXX = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(not CXX, reason="no C++ compiler")
@pytest.mark.parametrize("header", files("csrc/core/", ".h"), ids=lambda path: Path(path).stem)
def test_core_header_compiles_alone(header, tmp_path):
    """Included first and twice, with every warning an error."""
    include = header.removeprefix("csrc/")
    unit = tmp_path / "unit.cpp"
    unit.write_text(f'#include "{include}"\n#include "{include}"\n')
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    subprocess.run([CXX, *flags, f"-I{ROOT / 'csrc'}", str(unit)], check=True)


@pytest.mark.skipif(not toolchain.find_nvcc(), reason="no nvcc")
def test_core_is_device_code(tmp_path):
    unit = ROOT / "tests" / "core" / "device_code.cu"
    flags = ["-std=c++20", "-arch=sm_80", "-Werror", "all-warnings", f"-I{ROOT / 'csrc'}"]
    command = [toolchain.find_nvcc(), *flags, "-c", str(unit), "-o", str(tmp_path / "unit.o")]
    subprocess.run(command, check=True)
    included = set(re.findall(r'#include "core/(\w+\.h)"', unit.read_text()))
    assert {Path(path).name for path in files("csrc/core/", ".h")} - included == {"host_device.h"}
