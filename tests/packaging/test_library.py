"""Every way in which the op library can fail to fit ends in one line that says what to do."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from flashattn_ext import _library
from flashattn_ext._version import __version__


@pytest.fixture
def library_with_stamp(tmp_path):
    """Makes a library whose stamp says what the test wants, or that has none."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")

    def make(stamp):
        name = "flashattn_ext_build_stamp" if stamp is not None else "something_else"
        source = tmp_path / "stamp.c"
        source.write_text(f'const char* {name}(void) {{ return "{stamp}"; }}\n')
        library = tmp_path / "stamp.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        return library

    return make


def message_of(library):
    with pytest.raises(ImportError) as caught:
        _library.load(library)
    message = str(caught.value)
    assert "\n" not in message
    assert "run `pip install" in message
    return message


def test_build_info_of_the_real_library():
    info = _library.build_info()
    assert info["version"] == __version__
    assert len(info["schema"]) == 64
    assert info.keys() == {"version", "schema", "torch", "cuda", "compiler"}


def test_missing_library(tmp_path):
    assert "is not built" in message_of(tmp_path / "_C.so")


def test_library_that_does_not_load(tmp_path):
    library = tmp_path / "_C.so"
    library.write_text("not a library")
    message = message_of(library)
    assert "does not load" in message
    assert torch.__version__ in message


def test_library_without_a_stamp(library_with_stamp):
    assert "of version unknown" in message_of(library_with_stamp(None))


def test_library_of_another_version(library_with_stamp):
    message = message_of(library_with_stamp("version=0.0.7 schema=0 torch=2.11.0 cuda= compiler=x"))
    assert __version__ in message
    assert "0.0.7" in message


def test_library_of_another_schema(tmp_path, monkeypatch):
    schema = tmp_path / "schema.cpp"
    schema.write_text("another schema")
    monkeypatch.setattr(_library, "_SCHEMA", schema)
    with pytest.raises(ImportError, match="older or newer than its sources: run `pip install -e"):
        _library.load()


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cu128", "1.13.1"])
def test_old_torch(version):
    with pytest.raises(ImportError, match=rf"needs torch >= 2\.11, but torch {version[:4]}"):
        _library.check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0.dev20261101", "3.0.0a0+git1"])
def test_new_torch(version):
    _library.check_torch(version)


def test_no_torch(tmp_path):
    """Without torch, importing the package says so."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    package = os.path.dirname(os.path.dirname(_library.__file__))
    finished = subprocess.run(
        [sys.executable, "-c", "import flashattn_ext"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), package])},
        capture_output=True,
        text=True,
    )
    assert finished.stderr.splitlines()[-1].endswith(
        "flashattn_ext needs torch >= 2.11: run `pip install torch`"
    )
