"""What the op library asks of the machine that loads it: libtorch's C interface, nothing else."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import flashattn_ext

LIBRARY = Path(flashattn_ext.__file__).parent / "_C.so"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def symbols(kind):
    lines = run("nm", "--demangle", "--dynamic", kind, str(LIBRARY)).splitlines()
    return [re.sub(r"^[0-9a-f ]*[A-Za-z] ", "", line) for line in lines]


def test_only_the_c_interface_of_torch_is_imported():
    undefined = symbols("--undefined-only")
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert [name for name in undefined if re.search(r"\b(at|c10|torch|caffe2)::", name)] == []


def test_nothing_of_python_or_cuda_is_imported():
    # Kernels reach the driver through the static CUDA runtime, which opens it when it is there.
    undefined = symbols("--undefined-only")
    assert [name for name in undefined if re.match(r"_?Py|cu[A-Z]|cuda[A-Z]", name)] == []


def test_only_the_stamp_is_exported():
    exported = set(symbols("--defined-only")) - {"__bss_start", "_edata", "_end"}
    assert exported == {"flashattn_ext_build_stamp", "flashattn_ext_instruction_set"}


def test_needs_no_library_but_torch_and_the_system():
    dynamic = run("readelf", "--dynamic", "--wide", str(LIBRARY))
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", dynamic))
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2"}
    system |= {"libpthread.so.0", "librt.so.1"}
    assert {name for name in needed - system if not name.startswith("ld-linux")} == {
        "libtorch_cpu.so"
    }
    assert not re.search(r"R(UN)?PATH", dynamic)


def test_instruction_set_files_share_no_function():
    """A function that an AVX-512 file and a baseline file both hold is kept once by the linker,
    perhaps the AVX-512 one: an illegal instruction on older processors."""
    objects = sorted(ROOT.glob("build/*/CMakeFiles/cpu.dir/csrc/cpu/microkernel_avx*.cpp.o"))
    if not objects:
        pytest.skip("no build tree here")
    for file in objects:
        defined = run("nm", "--demangle", "--defined-only", str(file)).splitlines()
        shared = [line for line in defined if re.match(r"[0-9a-f]+ [WVu] ", line)]
        assert shared == [], file
