"""What the rows of a run say about where they come from."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import torch

import flashattn_ext

# From the plainest to the richest; the last that the processor has is named.
INSTRUCTION_SETS = ("sse4_2", "avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe(device: str, commit: str | None = None) -> dict[str, str]:
    """Columns of every row: machine, instruction set or driver, versions, commit, threads."""
    about = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "package": flashattn_ext.__version__,
        "commit": commit or current_commit(),
        "threads": str(torch.get_num_threads()),
    }
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return {
            "machine": torch.cuda.get_device_name(),
            "instruction_set": f"sm_{major}{minor}",
            "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        } | about
    name, instruction_set = processor()
    return {"machine": name, "instruction_set": instruction_set, "driver": ""} | about


def processor() -> tuple[str, str]:
    """The processor's name, family and model, and its richest instruction set."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    field = {key: value for key, value in re.findall(r"^(.+?)\s*: (.*)$", text, re.M)}
    flags = field.get("flags", "").split()
    known = [name for name in INSTRUCTION_SETS if name in flags]
    name = field.get("model name", "unknown processor")
    family = f"family {field.get('cpu family', '?')} model {field.get('model', '?')}"
    capped = os.environ.get("FLASHATTN_EXT_CPU")
    best = (known or ["baseline"])[-1]
    return f"{name} ({family})", f"{best}, capped at {capped}" if capped else best


def current_commit() -> str:
    commit = output("git", "rev-parse", "--short", "HEAD")
    changed = output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""
