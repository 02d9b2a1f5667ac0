"""A progress bar: tqdm's on a terminal where it is installed, else a line now and then."""

from __future__ import annotations

import sys
import time


class ProgressBar:
    """Shows step, loss, tokens/s and the time left. A context manager; `step()` moves it on."""

    def __init__(self, title: str, steps: int, tokens_per_step: int):
        self.title, self.steps, self.tokens_per_step = title, steps, tokens_per_step
        self.done = 0
        self.started = time.perf_counter()
        self.bar = _tqdm(title, steps)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def step(self, loss: float) -> None:
        self.done += 1
        elapsed = time.perf_counter() - self.started
        speed = f"{self.tokens_per_step * self.done / elapsed:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f} nats/byte, {speed}", refresh=False)
            self.bar.update()
        elif self.done % max(1, self.steps // 10) == 0:
            left = elapsed / self.done * (self.steps - self.done)
            where = f"{self.title} {self.done}/{self.steps}"
            print(f"{where}  loss {loss:.3f} nats/byte, {speed}, {left:.0f} s left", flush=True)


def _tqdm(title: str, steps: int):
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, desc=title, unit="step", file=sys.stderr, dynamic_ncols=True)
