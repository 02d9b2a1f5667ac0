"""What is timed is right, and what is wrong is not timed."""

import dataclasses

import formula
import pytest
import torch

from benchmarks import run
from benchmarks.attention import Attention, make_tensors
from benchmarks.check import LIMITS, ExactResults
from benchmarks.peers import PEERS

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "bool mask": {"mask": "random bool"},
    "float mask": {"mask": "float"},
    "key lengths": {"key_lengths": (5, 20)},
    "dropout": {"dropout_p": 0.25},
}


def make_case(**options):
    return Attention("test", "training", "fp32", 2, 4, 2, 20, 20, 8, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_exact_results_are_those_of_the_tests_formula(options):
    case = make_case(**options)
    t = make_tensors(case, "cpu")
    inputs = [x.detach().double().requires_grad_() for x in (t.query, t.key, t.value)]
    mask = t.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().double().requires_grad_()
    window = (case.window - 1, 0) if case.window else None
    out = formula.attention(
        *inputs, attn_mask=mask, causal=case.causal, window=window, key_lengths=t.key_lengths,
        dropout_p=case.dropout_p, rng_state=t.rng_state, alignment="top_left",
    ).out  # fmt: skip
    if mask is not None and mask.requires_grad:
        inputs.append(mask)
    gradients = torch.autograd.grad(out, inputs, t.grad_out.double())
    names = ("query", "key", "value", "mask")
    results = {"out": out} | dict(zip(names, gradients, strict=False))
    errors = ExactResults(case, t).errors(results)
    assert errors.keys() == results.keys()
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("wrong", ["out", "query", "key", "value"])
def test_a_wrong_result_is_found(wrong):
    case = make_case(causal=True)
    t = make_tensors(case, "cpu")
    _, results = run.start(case, t, PEERS["ours"](case, t))
    errors = ExactResults(case, t).errors(results)
    assert max(errors.values()) < LIMITS["fp32"]
    results[wrong] = results[wrong] * 1.001
    errors = ExactResults(case, t).errors(results)
    assert [name for name, error in errors.items() if error > LIMITS["fp32"]] == [wrong]


def test_a_wrong_peer_is_not_timed(monkeypatch):
    case = make_case(causal=True)
    full = dataclasses.replace(case, causal=False)
    monkeypatch.setitem(PEERS, "torch", lambda _, t: PEERS["ours"](full, t))
    rows, calls, _ = run.prepare_attention(case, "cpu", ["ours", "torch"])
    assert list(calls) == ["ours"]
    assert [row["note"][:13] for row in rows] == ["", "wrong result:"]
    assert not run.is_failure(rows[1])
    assert run.is_failure(rows[1] | {"implementation": "ours"})
