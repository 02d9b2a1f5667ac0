"""Trains one GPT with one attention function, and measures it: losses, speed, memory."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpt import ATTENTIONS, GPT, Shape
from progress import ProgressBar
from source_text import batches, read_sources, split

LEARNING_RATE = 4e-3
WARM_UP = 0.1  # the share of the steps in which the learning rate rises


@dataclass
class Settings:
    """All that decides a run, but for the attention function."""

    device: str
    dtype: torch.dtype
    shape: Shape
    steps: int
    batch_tokens: int
    context: int
    dropout: float
    seed: int

    def model(self, attention: str) -> GPT:
        torch.manual_seed(self.seed)
        return GPT(self.shape, ATTENTIONS[attention], self.dropout).to(self.device)

    def autocast(self) -> torch.autocast:
        mixed = self.dtype != torch.float32
        return torch.autocast(self.device, self.dtype, enabled=mixed)


@dataclass
class Run:
    """What came of a training run."""

    attention: str
    losses: list[float] = field(default_factory=list)  # nats/byte, of each step
    seconds: list[float] = field(default_factory=list)  # since the start, after each step
    held_out: float = math.nan  # nats/byte on files that were not trained on, without dropout
    peak_bytes: int = 0  # memory on top of what weights, optimizer and text take at the start
    tokens_per_second: float = 0.0

    @property
    def final_loss(self) -> float:
        """Mean loss of the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def train(settings: Settings, attention: str, weights: Path | None = None) -> Run:
    """Trains a new model; the weights are saved to `weights`."""
    device = torch.device(settings.device)
    sources, held_out = split(read_sources())
    model = settings.model(attention)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step / settings.steps)
    )
    text = batches(sources, settings.batch_tokens, settings.context, settings.seed, device)
    run = Run(attention)
    memory = PeakMemory(device)
    start = time.perf_counter()
    with ProgressBar(f"{attention:>5}", settings.steps, settings.batch_tokens) as bar:
        for batch in itertools.islice(text, settings.steps):
            with settings.autocast():
                loss = model.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            run.losses.append(loss.item())
            run.seconds.append(time.perf_counter() - start)
            if not math.isfinite(run.losses[-1]):
                raise SystemExit(f"train_gpt: the loss of {attention} is {run.losses[-1]}")
            bar.step(run.losses[-1])
    run.peak_bytes = memory.growth()
    run.tokens_per_second = speed(run.seconds, settings.batch_tokens)
    run.held_out = evaluate(model, settings, held_out)
    if weights:
        torch.save(model.state_dict(), weights)
    return run


def learning_rate_factor(progress: float) -> float:
    """A linear rise, then half a cosine down to a tenth. `progress` runs from 0 to 1."""
    if progress < WARM_UP:
        return (progress + 0.01) / (WARM_UP + 0.01)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def speed(seconds: list[float], tokens_per_step: int) -> float:
    """Tokens per second after the first step, which also warms up caches and allocators."""
    steps = len(seconds) - 1
    return tokens_per_step * steps / (seconds[-1] - seconds[0]) if steps else math.nan


@torch.inference_mode()
def evaluate(model: GPT, settings: Settings, sources: list[bytes]) -> float:
    """Mean loss in nats/byte on a few batches of files that were held out, without dropout."""
    text = batches(sources, settings.batch_tokens, settings.context, 0, settings.device)
    model.eval()
    with settings.autocast():
        losses = [model.loss(batch).item() for batch in itertools.islice(text, 8)]
    return sum(losses) / len(losses)


class PeakMemory:
    """How far memory grows from now on: the allocator's on a GPU, the process's on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start = torch.cuda.memory_allocated(device)
        else:
            self.start = self._of_process("VmRSS")

    def growth(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        return self._of_process("VmHWM") - self.start

    @staticmethod
    def _of_process(what: str) -> int:
        """VmRSS: resident bytes now. VmHWM: their maximum since the process began."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def train_alone(settings: Settings, attention: str, weights: Path) -> Run:
    """`train` in a fresh process, so that the memory and the warm-up of each run are its own."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        try:
            return pool.submit(train, settings, attention, weights).result()
        except BrokenProcessPool:
            raise SystemExit(
                f"train_gpt: the process that trained with {attention} was killed; if memory ran "
                "out, a smaller --batch-tokens or --context helps"
            ) from None
