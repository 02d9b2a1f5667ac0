"""What a build needs and where it lies on this machine. Used by setup.py and build_backend.py.

``find_*`` return None, ``require_*`` end the build with one line that says what to do. Run as a
program, it prints what pip has to install for a build without isolation.
"""

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

MINIMUM_TORCH = "2.11"
MINIMUM_CMAKE = "3.25"
GIB_PER_JOB = {"c++": 1.0, "nvcc": 4.0}


def missing_requirements() -> list[str]:
    """What an isolated build has to install: nothing that can be used where it is."""
    missing = []
    if find_tool("cmake", MINIMUM_CMAKE) is None:
        missing.append(f"cmake>={MINIMUM_CMAKE}")
    if find_tool("ninja") is None:
        missing.append("ninja")
    if find_torch() is None:
        missing.append(f"torch>={MINIMUM_TORCH}")
    if wants_cuda() and find_nvcc() is None:
        missing += nvcc_requirements()
    return missing


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _submodule_folders(module: str) -> list[str]:
    spec = importlib.util.find_spec(module)
    return list(spec.submodule_search_locations or []) if spec else []


# --- Programs


def find_tool(name: str, minimum: str = "0") -> str | None:
    """A program that runs and is new enough, on PATH or beside the running interpreter.

    A script that belongs to an environment hidden from an isolated build is found but fails.
    """
    for path in (None, sysconfig.get_path("scripts")):
        tool = shutil.which(name, path=path)
        if tool:
            said = subprocess.run([tool, "--version"], capture_output=True, text=True)
            if said.returncode == 0 and _numbers(said.stdout) >= _numbers(minimum):
                return tool
    return None


def require_tool(name: str, minimum: str = "0") -> str:
    tool = find_tool(name, minimum)
    if tool is None:
        wanted = name if minimum == "0" else f"{name}>={minimum}"
        sys.exit(f"flashattn_ext: building needs {wanted}: run `pip install '{wanted}'`")
    return tool


def require_compiler() -> None:
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers):
        sys.exit(
            f"flashattn_ext: no C++ compiler found (looked for {', '.join(compilers)}): install "
            "g++ 11 or newer (Debian, Ubuntu: `apt-get install g++`) or set CXX"
        )


# --- torch


def find_torch() -> Path | None:
    """The folder of a torch that is new enough, in this environment or the interpreter's.

    An isolated build cannot import from the interpreter's packages, but may read headers there:
    the binary is the same for every torch from 2.11 on.
    """
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    folders.append(site.getusersitepackages())
    candidates = [*_submodule_folders("torch"), *(os.path.join(path, "torch") for path in folders)]
    for folder in map(Path, candidates):
        if (folder / "version.py").exists() and (folder / "include").is_dir():
            found = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text())
            if found and _numbers(found[1]) >= _numbers(MINIMUM_TORCH):
                return folder
    return None


def require_torch() -> Path:
    folder = find_torch()
    if folder is None:
        wanted = f"torch>={MINIMUM_TORCH}"
        sys.exit(f"flashattn_ext: building needs {wanted}: run `pip install '{wanted}'`")
    return folder


# --- CUDA


def wants_cuda() -> bool:
    return os.environ.get("FLASHATTN_EXT_CUDA", "") != "0"


def find_nvcc() -> str | None:
    """nvcc on PATH, in CUDA_HOME, or from the PyPI packages; cmake/cuda.cmake looks there too."""
    folders = [os.path.join(os.environ["CUDA_HOME"], "bin")] if os.environ.get("CUDA_HOME") else []
    folders += [os.path.join(folder, "cu13", "bin") for folder in _submodule_folders("nvidia")]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))


def nvcc_requirements() -> list[str]:
    """The CUDA compiler from PyPI: all packages of one CUDA 13 line."""
    version = os.environ.get("FLASHATTN_EXT_CUDA_VERSION", "13.0")
    line = re.fullmatch(r"13\.(\d+)", version)
    if not line:
        sys.exit(
            f"flashattn_ext: FLASHATTN_EXT_CUDA_VERSION={version}: PyPI has the compilers of CUDA "
            "13.x only; for another one install its toolkit, and put nvcc on PATH or set CUDA_HOME"
        )
    packages = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime"]
    packages.append("nvidia-nvtx")  # headers of the ranges that a profiler shows
    # CCCL has numbers of its own from 13.3 on.
    cccl = f"nvidia-cuda-cccl>=13.0,<13.{int(line[1]) + 1}"
    return [*(f"{package}=={version}.*" for package in packages), cccl]


def cuda_architectures() -> str | None:
    """CMake's list, from FLASHATTN_EXT_CUDA_ARCHITECTURES or torch's TORCH_CUDA_ARCH_LIST.

    "9.0" means sm_90a, the only Hopper code that is compiled; nothing older than 8.0 has kernels.
    """
    if os.environ.get("FLASHATTN_EXT_CUDA_ARCHITECTURES"):
        return os.environ["FLASHATTN_EXT_CUDA_ARCHITECTURES"]
    found = re.findall(r"(\d+)\.(\d)(a?)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    wanted = [(int(major + minor), suffix) for major, minor, suffix in found if int(major) >= 8]
    return ";".join("90a" if n == 90 else f"{n}{suffix}" for n, suffix in sorted(wanted)) or None


# --- Parallel jobs


def _available_gib() -> float:
    """Free memory of the machine or of this process's control group, whichever is less."""
    available = float("inf")
    try:
        kilobytes = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        available = int(kilobytes[1]) / 2**20
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        available = min(available, (limit - int((group / "memory.current").read_text())) / 2**30)
    except (OSError, TypeError, ValueError):
        pass  # no such file, or no limit ("max")
    return available


def parallel_jobs() -> int:
    """Compiler processes at a time: one a core, as far as free memory goes; or MAX_JOBS."""
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    compiler = "nvcc" if wants_cuda() and find_nvcc() else "c++"
    by_memory = _available_gib() / GIB_PER_JOB[compiler]
    return int(max(1, min(len(os.sched_getaffinity(0)), by_memory)))


if __name__ == "__main__":
    print("\n".join(missing_requirements()))
