"""Loads the op library ``_C.so``, or says in one line what to do when it cannot be used.

The library has no Python in it: it registers ``torch.ops.flashattn_ext.*`` when it is loaded, and
works with every torch from 2.11 on.
"""

import ctypes
import hashlib
from pathlib import Path

from ._version import __version__

MINIMUM_TORCH = (2, 11)

_PACKAGE = Path(__file__).parent
_SCHEMA = _PACKAGE.parent / "csrc" / "ops" / "schema.cpp"  # there in a source checkout only


def _remedy() -> str:
    if _SCHEMA.exists():
        return f"run `pip install -e . --no-build-isolation` in {_PACKAGE.parent}"
    return "run `pip install --force-reinstall --no-deps flashattn_ext`"


def check_torch(version: str) -> None:
    """Raises ImportError when a torch of this version (``torch.__version__``) is too old."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < MINIMUM_TORCH:
        needed = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(
            f"flashattn_ext needs torch >= {needed}, but torch {version} is installed: "
            f"run `pip install 'torch>={needed}'`"
        )


def build_info(library: Path = _PACKAGE / "_C.so") -> dict[str, str]:
    """What the op library was built from.

    Keys: ``version`` of this package, ``schema`` (SHA-256 of the op schemas' source), ``torch``
    (of the headers), ``cuda`` (``nvcc version:architectures``, empty without CUDA kernels) and
    ``compiler``.
    """
    try:
        stamp = ctypes.CDLL(str(library)).flashattn_ext_build_stamp
    except AttributeError:
        return {}
    stamp.restype = ctypes.c_char_p
    return dict(entry.split("=", 1) for entry in stamp().decode().split(" "))


def instruction_set(library: Path = _PACKAGE / "_C.so") -> str:
    """The instruction set of the CPU kernels, as FLASHATTN_EXT_CPU names it."""
    name = ctypes.CDLL(str(library)).flashattn_ext_instruction_set
    name.restype = ctypes.c_char_p
    return name().decode()


def check_build(info: dict[str, str]) -> None:
    """Raises ImportError when a library with this :func:`build_info` is not of these files."""
    if info.get("version") != __version__:
        raise ImportError(
            f"flashattn_ext {__version__} found an op library of version "
            f"{info.get('version', 'unknown')}: {_remedy()}"
        )
    if _SCHEMA.exists() and info["schema"] != hashlib.sha256(_SCHEMA.read_bytes()).hexdigest():
        raise ImportError(
            f"flashattn_ext's op library is older or newer than its sources: {_remedy()}"
        )


def load(library: Path = _PACKAGE / "_C.so") -> None:
    """Registers the ops of the library; ImportError, with what to do, when it does not fit."""
    try:
        import torch
    except ModuleNotFoundError:
        raise ImportError("flashattn_ext needs torch >= 2.11: run `pip install torch`") from None
    check_torch(torch.__version__)
    if not library.exists():
        raise ImportError(f"flashattn_ext's op library is not built: {_remedy()}")
    try:
        info = build_info(library)
    except OSError as error:
        raise ImportError(
            f"flashattn_ext's op library does not load under torch {torch.__version__} "
            f"({error}): {_remedy()}"
        ) from None
    check_build(info)
    torch.ops.load_library(library)


load()
