"""Random problems over all options and dtypes, gradients included, against the formula.

FLASHATTN_EXT_SEED repeats a run, FLASHATTN_EXT_RANDOM_PROBLEMS sets the number of problems. A
failure names its problem, which is complete: `checks.check(op, Problem(...), device, seed=...)`
repeats it.
"""

from __future__ import annotations

import os
import random

import pytest
from checks import check, flash_attention, flash_attention_varlen, naive_attention
from problems import random_problem

OPS = ("flash_attention_forward", "flash_attention_varlen_forward", "naive_attention_forward")
PROBLEMS = int(os.environ.get("FLASHATTN_EXT_RANDOM_PROBLEMS", "200"))
BATCH = 10  # problems a test


@pytest.mark.parametrize("batch", range((PROBLEMS + BATCH - 1) // BATCH))
def test_random_problems(batch, device):
    seed = int(os.environ["FLASHATTN_EXT_SEED"])  # conftest.py draws one where none is given
    for index in range(batch * BATCH, min(PROBLEMS, (batch + 1) * BATCH)):
        rng = random.Random(seed * 1_000_003 + index)
        problem, naive = random_problem(rng), rng.random() < 0.25
        if problem.packed:
            op = flash_attention_varlen
        else:
            op = naive_attention if naive else flash_attention
        try:
            check(op, problem, device, weights=op is naive_attention, seed=index)
        except Exception as failure:
            message = f"FLASHATTN_EXT_SEED={seed}, problem {index}: {op.__name__} {problem!r}"
            print(message)
            raise AssertionError(f"{message}\n{failure}") from failure
