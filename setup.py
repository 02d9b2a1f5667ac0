"""Builds the op library by calling CMake. Metadata is in pyproject.toml, sources and flags are in
CMakeLists.txt, and where torch and nvcc come from is in tools/toolchain.py.

Environment:
    FLASHATTN_EXT_CUDA                0: no CUDA kernels; 1: nvcc must be there; else: if it is
    FLASHATTN_EXT_CUDA_ARCHITECTURES  for example "90a" or "80;90a" (default: see CMakeLists.txt)
    FLASHATTN_EXT_CUDA_VERSION        CUDA 13.x to fetch where there is no nvcc (default 13.0)
    MAX_JOBS                          compiler processes at a time (default: by cores and memory)
    CMAKE_ARGS                        further arguments for CMake
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

try:
    from setuptools import Extension, setup
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build import build
    from setuptools.command.build_ext import build_ext
except ImportError:
    sys.exit("flashattn_ext: building needs setuptools>=77: run `pip install 'setuptools>=77'`")

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402

PACKAGE = "flashattn_ext"


class CMakeBuild(build_ext):
    """Builds ``_C.so`` into the wheel, or beside the Python files for an editable install."""

    def run(self) -> None:
        inplace = self.inplace or self.editable_mode
        output = ROOT / PACKAGE if inplace else Path(self.build_lib).resolve() / PACKAGE
        tree = ROOT / "build" / "setup"
        cmake = toolchain.require_tool("cmake", toolchain.MINIMUM_CMAKE)
        toolchain.require_compiler()
        options = {
            "CMAKE_MAKE_PROGRAM": toolchain.require_tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "FLASHATTN_EXT_TORCH_DIR": toolchain.require_torch(),
            "FLASHATTN_EXT_OUTPUT_DIR": output,
            "FLASHATTN_EXT_CUDA": os.environ.get("FLASHATTN_EXT_CUDA") or "AUTO",
            "BUILD_TESTING": "OFF",
        }
        if architectures := toolchain.cuda_architectures():
            options["FLASHATTN_EXT_CUDA_ARCHITECTURES"] = architectures
        # An isolated build's tools lie elsewhere each time, so what CMake remembers of them goes;
        # objects stay (`cmake --fresh` would remove them too).
        (tree / "CMakeCache.txt").unlink(missing_ok=True)
        for found_tools in (tree / "CMakeFiles").glob("[0-9]*"):
            shutil.rmtree(found_tools)
        self._call(
            *(cmake, "-S", str(ROOT), "-B", str(tree), "-G", "Ninja"),
            *(f"-D{name}={value}" for name, value in options.items()),
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        )
        jobs = str(toolchain.parallel_jobs())
        self._call(cmake, "--build", str(tree), "--target", "_C", "--parallel", jobs)

    @staticmethod
    def _call(*command: str) -> None:
        print(shlex.join(command), flush=True)
        if subprocess.run(command).returncode != 0:
            sys.exit("flashattn_ext: the build failed; the first error above is the reason")

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / PACKAGE / "_C.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class CleanBuild(build):
    """Starts from an empty folder: setuptools would pack files that the sources no longer have."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class PlatformWheel(bdist_wheel):
    """The op library depends on the platform, but on no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
