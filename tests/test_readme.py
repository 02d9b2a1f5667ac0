"""The README's Python blocks run, one after the other in one session, as it says."""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# What makes a tool check its arguments and end.
NOTHING = {"benchmarks.run": ["--list"], "benchmarks.plot": ["--help"]}


def test_python_blocks_run_in_order():
    text = README.read_text()
    session = {"__name__": "readme"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 5
    for block in blocks:
        first_line = text.count("\n", 0, block.start(1))
        # Blank lines in front: an error shows the line of the README.
        exec(compile("\n" * first_line + block[1], str(README), "exec"), session)


def commands(name):
    """The shell commands of a page: lines of bash blocks, and `make x` anywhere in code font."""
    text = (ROOT / name).read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [*lines, *re.findall(r"`(make [^`]+|\.ci/\w+)`", text)]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_commands_of_a_page_exist(page):
    found = [shlex.split(line, comments=True) for line in commands(page)]
    found = [words for words in found if words]
    assert len(found) > 3
    for words in found:
        while "=" in words[0]:  # NAME=value before a command
            words = words[1:]
        assert command_exists(*words), f"{page}: {shlex.join(words)}"


def command_exists(program, *arguments):
    if program in ("ncu", "perf"):  # of a Python command, or of what the line before recorded
        at = arguments.index("python") if "python" in arguments else len(arguments)
        return command_exists(*arguments[at:]) if arguments[at:] else "perf.data" in arguments
    if arguments[:1] == ("-m",) and arguments[1].startswith("benchmarks."):
        tool = importlib.import_module(arguments[1])
        try:
            return tool.main([*arguments[2:], *NOTHING[arguments[1]]]) == 0
        except SystemExit as end:
            return not end.code
    if program == "make":  # -n: says what it would do
        dry_run = ["make", "-n", *arguments]
        return subprocess.run(dry_run, cwd=ROOT, capture_output=True).returncode == 0
    if program == "cmake" and "--preset" in arguments:
        presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
        return arguments[-1] in [preset["name"] for preset in presets if not preset.get("hidden")]
    if program in ("cmake", "ctest"):
        return arguments[1].startswith("build/")
    if program in ("pip", "pre-commit"):
        return arguments[0] == "install"
    paths = [argument for argument in arguments if "/" in argument]
    if program in (".venv/bin/pytest", "python"):
        return all((ROOT / path).exists() for path in paths)
    return (ROOT / program).exists()
