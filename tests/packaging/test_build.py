"""The build's decisions, which need no compiler: what to install, what to build, what to pack."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "setup.py").exists():
    pytest.skip("needs a source checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402


@pytest.fixture
def source_copy(tmp_path):
    """The checkout without what was built in it."""
    ignored = shutil.ignore_patterns(
        "build", "dist", "runs", ".*", "*.so", "*.egg-info", "__pycache__"
    )
    return shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)


@pytest.fixture
def no_compiler(tmp_path):
    """An environment whose PATH has CMake and Ninja, but no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cmake", "ninja"):
        tool = toolchain.find_tool(name)
        if tool is None:
            pytest.skip(f"needs {name}")
        (folder / name).symlink_to(tool)
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    return {**kept, "PATH": str(folder)}


def setup_py(folder, environment, *arguments):
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_sdist_needs_no_compiler_and_holds_all_sources(source_copy, no_compiler):
    finished = setup_py(source_copy, no_compiler, "-q", "sdist")
    assert finished.returncode == 0, finished.stderr
    (archive,) = (source_copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    needed = [
        path
        for folder in ("csrc", "cmake", "tools", "tests")
        for path in (source_copy / folder).rglob("*")
        if path.is_file()
    ]
    needed += (source_copy / "flashattn_ext").rglob("*.py")
    assert {str(path.relative_to(source_copy)) for path in needed} - names == set()
    assert {"CMakeLists.txt", "pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert [name for name in names if name.endswith((".so", ".o", ".pyc"))] == []


def test_no_compiler(source_copy, no_compiler):
    finished = setup_py(source_copy, no_compiler, "build_ext", "--inplace")
    assert finished.returncode != 0
    assert finished.stderr.splitlines()[-1].startswith("flashattn_ext: no C++ compiler found")
    assert "apt-get install g++" in finished.stderr


def test_nothing_is_fetched_that_is_there(monkeypatch):
    monkeypatch.setattr(toolchain, "find_tool", lambda name, minimum="0": name)
    monkeypatch.setattr(toolchain, "find_torch", lambda: Path("torch"))
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: "nvcc")
    assert toolchain.missing_requirements() == []


def test_what_is_missing_is_fetched(monkeypatch):
    monkeypatch.setattr(toolchain, "find_tool", lambda name, minimum="0": None)
    monkeypatch.setattr(toolchain, "find_torch", lambda: None)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setenv("FLASHATTN_EXT_CUDA", "0")
    without_cuda = ["cmake>=3.25", "ninja", "torch>=2.11"]
    assert toolchain.missing_requirements() == without_cuda
    monkeypatch.delenv("FLASHATTN_EXT_CUDA")
    monkeypatch.delenv("FLASHATTN_EXT_CUDA_VERSION", raising=False)
    assert toolchain.missing_requirements() == [
        *without_cuda,
        "nvidia-cuda-nvcc==13.0.*",
        "nvidia-cuda-crt==13.0.*",
        "nvidia-nvvm==13.0.*",
        "nvidia-cuda-runtime==13.0.*",
        "nvidia-nvtx==13.0.*",
        "nvidia-cuda-cccl>=13.0,<13.1",
    ]


def test_cuda_12_compiler_is_not_on_pypi(monkeypatch):
    monkeypatch.setenv("FLASHATTN_EXT_CUDA_VERSION", "12.9")
    with pytest.raises(SystemExit, match="install its toolkit, and put nvcc on PATH"):
        toolchain.nvcc_requirements()


@pytest.mark.parametrize(
    ("torch_list", "expected"),
    [
        ("", None),
        ("8.0;9.0", "80;90a"),
        ("7.5 8.6 9.0a 12.0+PTX", "86;90a;120"),
        ("10.0a;8.9", "89;100a"),
    ],
)
def test_architectures_of_torch(monkeypatch, torch_list, expected):
    monkeypatch.delenv("FLASHATTN_EXT_CUDA_ARCHITECTURES", raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", torch_list)
    assert toolchain.cuda_architectures() == expected
    monkeypatch.setenv("FLASHATTN_EXT_CUDA_ARCHITECTURES", "90a")
    assert toolchain.cuda_architectures() == "90a"


@pytest.mark.parametrize(
    ("gib", "nvcc", "expected"), [(64, "nvcc", 8), (9, "nvcc", 2), (9, None, 8), (0.1, None, 1)]
)
def test_jobs_fit_cores_and_memory(monkeypatch, gib, nvcc, expected):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.delenv("FLASHATTN_EXT_CUDA", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(toolchain, "_available_gib", lambda: gib)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: nvcc)
    assert toolchain.parallel_jobs() == expected
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.parallel_jobs() == 3
