"""Trains a small GPT on the sources of Python's standard library: once with the attention of
flashattn_ext, once with torch's. Same weights, same bytes, same schedule; then it compares.

    python examples/train_gpt.py            both runs, a comparison, a sample, a picture
    python examples/train_gpt.py --help     the arguments

The model is in gpt.py, the text in source_text.py, a training run in training.py. Weights and
picture go to runs/train_gpt/.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gpt import ATTENTIONS, Shape
from source_text import Batch
from training import Run, Settings, train, train_alone

import flashattn_ext

# Without dropout the two runs do the same arithmetic in another order, so their losses may differ
# by rounding only, step for step. With dropout they draw different masks, so the two losses are
# two samples of one experiment: their means over the last steps may differ by chance.
EXACT_STEPS = 5
EXACT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # nats/byte
DROPOUT_TOLERANCE = 0.05  # nats/byte

# What a run takes if the command line does not say otherwise.
DEFAULTS = {
    "cpu": {
        "shape": Shape(width=128, layers=3, heads_q=4, heads_kv=2),
        "steps": 1800,
        "batch_tokens": 512,
        "context": 256,
        "dtype": "float32",
    },
    "cuda": {
        "shape": Shape(width=512, layers=8, heads_q=8, heads_kv=2),
        "steps": 1000,
        "batch_tokens": 32_768,
        "context": 32_768,
        "dtype": "bfloat16",
    },
    "quick": {
        "shape": Shape(width=32, layers=2, heads_q=4, heads_kv=2),
        "steps": 20,
        "batch_tokens": 512,
        "context": 128,
        "dtype": "float32",
    },
}


def agree(what: str, ours: list[float], theirs: list[float], tolerance: float) -> bool:
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    same = difference <= tolerance
    verdict = "agree" if same else "DO NOT AGREE"
    print(f"{what}: {verdict}, difference {difference:.1e}, allowed {tolerance:.0e} nats/byte")
    return same


def why_not(device: str) -> str:
    """Why our attention cannot train on `device`; an empty string if it can."""
    try:
        head = torch.ones(4, 1, 8, device=device, requires_grad=True)
        batch = Batch.pack([b"two", b"!"], torch.device(device))
        ATTENTIONS["ours"](head, head, head, batch, 0.5).sum().backward()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA: an AssertionError
        return str(error).strip().splitlines()[0]
    return ""


def choose_device(wanted: str | None) -> str:
    """The device that was asked for, else the GPU if our attention runs there, else the CPU."""
    if wanted:
        if reason := why_not(wanted):
            raise SystemExit(f"train_gpt: cannot train on --device {wanted}: {reason}")
        return wanted
    if torch.cuda.is_available():
        if not (reason := why_not("cuda")):
            return "cuda"
        print(f"There is a GPU, but training goes to the CPU: {reason}")
    return "cpu"


def describe_kernel(settings: Settings) -> str:
    """Which of our kernels will do the work, in the package's own words."""
    total, shape = settings.batch_tokens, settings.shape
    empty = partial(torch.empty, device=settings.device, dtype=settings.dtype)
    query = empty(total, shape.heads_q, shape.head_dim)
    key = empty(total, shape.heads_kv, shape.head_dim)
    borders = torch.tensor([0, total], device=settings.device)
    call = (query, key, key, borders, borders, total, total)
    options = {"causal": True, "dropout_p": settings.dropout}
    return str(flashattn_ext.explain(*call, **options, function="flash_attention_varlen"))


def report(runs: list[Run], text_bytes: int) -> None:
    print(f"\nAfter {text_bytes:,} bytes of text (losses in nats/byte):\n")
    print(
        "attention  tokens/s  peak memory  seconds  final loss  held-out loss  held-out bits/byte"
    )
    for run in runs:
        print(
            f"{run.attention:<9}{run.tokens_per_second:>10,.0f}{run.peak_bytes / 2**20:>9,.0f} MiB"
            f"{run.seconds[-1]:>9.1f}{run.final_loss:>12.3f}{run.held_out:>15.3f}"
            f"{run.held_out / math.log(2):>20.3f}"
        )
    print()


def draw(runs: list[Run], path: Path) -> None:
    """The loss by step, where the curves should lie on each other, and by time."""
    try:
        import matplotlib
    except ImportError:
        print("No picture: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    window = max(1, len(runs[0].losses) // 30)
    for run, colour, line in zip(runs, ("tab:blue", "tab:orange"), ("-", "--"), strict=True):
        losses = torch.tensor(run.losses)
        smooth = losses.unfold(0, window, 1).mean(-1)
        for axes, x in ((by_step, range(1, len(losses) + 1)), (by_time, run.seconds)):
            axes.plot(x, losses, color=colour, alpha=0.2, linewidth=1)
            axes.plot(x[window - 1 :], smooth, color=colour, linestyle=line, label=run.attention)
    by_step.set(xlabel="step", ylabel="training loss (nats/byte)")
    by_time.set(xlabel="seconds")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("A small GPT on Python's standard library, the same steps with both attentions")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"Picture of both loss curves: {path}")


def parse_arguments() -> tuple[Settings, Path]:
    here = Path(__file__).resolve().parents[1] / "runs" / "train_gpt"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive)
    parser.add_argument("--batch-tokens", type=positive, help="bytes of text in a step")
    parser.add_argument("--context", type=positive, help="bytes: a longer file is cut in pieces")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--dropout", type=float, default=0.1, help="of the attention weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if it can")
    parser.add_argument("--quick", action="store_true", help="a tiny run that only shows it works")
    parser.add_argument("--out", type=Path, default=here, help="folder for weights and picture")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    out, quick = given.pop("out"), given.pop("quick")
    given["device"] = choose_device(given.get("device"))
    chosen = DEFAULTS["quick" if quick else given["device"]] | given
    return Settings(**chosen | {"dtype": getattr(torch, chosen["dtype"])}), out


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {number}")
    return number


def main() -> None:
    settings, out = parse_arguments()
    out.mkdir(parents=True, exist_ok=True)
    parameters = sum(p.numel() for p in settings.model("ours").parameters())
    print(f"{parameters:,} parameters on {settings.device} in {settings.dtype}")
    print(f"{describe_kernel(settings)}\n")

    print(f"Without dropout, {EXACT_STEPS} steps: equal but for rounding?")
    exact = replace(settings, dropout=0.0, steps=EXACT_STEPS)
    ours, theirs = (train(exact, attention) for attention in ("ours", "torch"))
    tolerance = EXACT_TOLERANCE[settings.dtype]
    if not agree("Step by step", ours.losses, theirs.losses, tolerance):
        raise SystemExit("train_gpt: the two attentions do not agree, see above")

    print(
        f"\nWith dropout {settings.dropout}, {settings.steps} steps, each in a process of its own:"
    )
    ours, theirs = (train_alone(settings, name, out / f"{name}.pt") for name in ("ours", "torch"))
    report([ours, theirs], settings.steps * settings.batch_tokens)
    same = agree("Final loss", [ours.final_loss], [theirs.final_loss], DROPOUT_TOLERANCE)
    same &= agree("Held-out loss", [ours.held_out], [theirs.held_out], DROPOUT_TOLERANCE)
    draw([ours, theirs], out / "loss.png")

    model = settings.model("ours").eval()
    model.load_state_dict(torch.load(out / "ours.pt", weights_only=True))
    text = model.sample(b"def ", settings.context, temperature=0.6, context=settings.context)
    print(f"\nOur model continues 'def ':\n\n{text.decode(errors='replace')}\n")
    if not same:
        raise SystemExit("train_gpt: the two attentions do not agree, see above")


if __name__ == "__main__":
    main()
