"""The demo, run as a user runs it, only smaller."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flashattn_ext

DEMO = Path(__file__).parents[1] / "examples" / "train_gpt.py"
# The demo uses the package that these tests use, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(flashattn_ext.__file__).parents[1])}


def run_demo(*arguments, script=DEMO):
    command = [sys.executable, str(script), "--quick", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("train_gpt")
    return run_demo("--out", out), out


def test_demo_ends_well(demo):
    finished, _ = demo
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_both_attentions_agree(demo):
    finished, _ = demo
    assert re.findall(r"^(.+): (.*agree)", finished.stdout, re.MULTILINE | re.IGNORECASE) == [
        ("Step by step", "agree"),
        ("Final loss", "agree"),
        ("Held-out loss", "agree"),
    ]


def test_loss_falls(demo):
    finished, _ = demo
    for attention in ("ours", "torch"):
        speed, _, _, trained, held_out = _row(finished.stdout, attention)
        assert speed > 0
        assert trained < 5.0  # nats/byte; log(256) = 5.545 is knowing nothing
        assert held_out < 5.0


def test_model_writes_text(demo):
    finished, _ = demo
    sampled = finished.stdout.split("Our model continues 'def ':")[1].strip()
    assert sampled.startswith("def ")
    assert len(sampled) > len("def ") + 10


def test_picture_and_weights_are_saved(demo):
    _, out = demo
    pytest.importorskip("matplotlib")
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "ours.pt").stat().st_size > 100_000


def test_attention_that_looks_into_other_documents_is_found(tmp_path):
    finished = run_demo("--out", tmp_path, script=_script_with_leak(tmp_path))
    assert finished.returncode == 1
    assert "do not agree" in finished.stderr


def _script_with_leak(folder):
    """The demo, with an attention in the place of ours that takes a batch for one document."""
    script = folder / "leak.py"
    script.write_text(f"""
import dataclasses, runpy, sys
sys.path.insert(0, {str(DEMO.parent)!r})
import gpt

def leak(query, key, value, batch, dropout_p):
    one_document = dataclasses.replace(batch, lengths=[len(query)])
    return gpt.attention_torch(query, key, value, one_document, dropout_p)

gpt.ATTENTIONS["ours"] = leak
runpy.run_path({str(DEMO)!r}, run_name="__main__")
""")
    return script


def _row(stdout, attention):
    """The numbers of a run in the table: tokens/s, MiB, seconds, train loss, held-out loss."""
    line = re.search(rf"^{attention} .* MiB .*$", stdout, re.MULTILINE)[0]
    return [float(n.replace(",", "")) for n in re.findall(r"[\d,]*\.?\d+", line)[:5]]
