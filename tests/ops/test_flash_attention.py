"""flash_attention against the formula: every option, forward and backward."""

from __future__ import annotations

import dataclasses

import pytest
from checks import check, flash_attention
from problems import DENSE_FACTORS, HEAD_DIMS, LENGTHS, Problem, selection

OPS = ("flash_attention_forward", "flash_attention_backward")


def by_name(problems):
    return pytest.mark.parametrize("problem", problems, ids=lambda problem: problem.name)


@by_name(selection(DENSE_FACTORS, seeds=(0, 1)))
def test_pairs_of_options(problem, device):
    check(flash_attention, problem, device)
