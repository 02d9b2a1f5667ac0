"""Bitwise the same again: over repeats, over threads, and with deterministic gradients."""

from __future__ import annotations

import pytest
import torch
from checks import DENSE_OPS, flash_attention_varlen, random_upstream, run
from problems import Problem, build

import flashattn_ext

OPS = ("flash_attention_forward", "flash_attention_varlen_forward")
ALL_OPS = {**DENSE_OPS, "varlen": flash_attention_varlen}


@pytest.fixture(params=ALL_OPS)
def op(request):
    return ALL_OPS[request.param]


@pytest.fixture
def more_threads():
    """Restores the number of threads that the test changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def problems_of(op, **options):
    everything = {
        "dtype": "bf16", "heads_q": 4, "head_dim": 40, "head_dim_v": 24, "causal": True,
        "alibi": "heads", "sinks": "fp32", "dropout_p": 0.2, "softcap": 8.0, **options,
    }  # fmt: skip
    if op is flash_attention_varlen:
        yield Problem(lengths=((70, 130), (1, 40), (0, 5), (129, 129), (33, 7)), **everything)
        yield Problem(lengths=((64, 64),) * 9, **everything)
    else:
        everything |= {"alignment": "bottom_right", "mask": "fp32"}
        yield Problem(batch=2, len_q=129, len_k=200, **everything)
        yield Problem(batch=1, heads_kv=1, len_q=190, len_k=65, **everything, mask_shape="11qk")
        yield Problem(batch=1, len_q=300, len_k=700, **everything | {"head_dim": 16})
        for shape in ("1hqk", "11q1", "b11k"):
            yield Problem(
                batch=2, heads_kv=2, len_q=70, len_k=600, **everything | {"head_dim": 16},
                mask_shape=shape,
            )  # fmt: skip
        yield Problem(batch=3, len_q=40, len_k=40, **everything | {"window": (20, 3), "mask": None})


def call(op, tensors, options, upstream=None, deterministic=None):
    def with_flag(*args, **named):
        return op(*args, deterministic=deterministic, **named)

    return run(with_flag, tensors, options, upstream)


def assert_same(a, b):
    for name in ("out", "lse", "max_logits"):
        assert torch.equal(getattr(a[0], name), getattr(b[0], name)), name
    for name in a[1]:
        assert torch.equal(a[1][name], b[1][name]), f"grad of {name}"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_forward_repeats(dtype, op, device):
    for problem in problems_of(op, dtype=dtype):
        tensors, options = build(problem, device)
        first = run(op, tensors, options)
        for _ in range(4):
            assert_same(first, run(op, tensors, options))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_forward_on_any_number_of_threads(dtype, op, more_threads):
    for problem in problems_of(op, dtype=dtype):
        tensors, options = build(problem)
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(run(op, tensors, options))
        for other in results[1:]:
            assert_same(results[0], other)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_deterministic_backward(dtype, op, device, more_threads):  # X1, X2, X3, X4, N11
    for problem in problems_of(op, dtype=dtype):
        tensors, options = build(problem, device)
        upstream = random_upstream(tensors, problem.packed)
        first = call(op, tensors, options, upstream, True)
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            assert_same(first, call(op, tensors, options, upstream, True))


def test_torch_switch_is_honoured(op, device, more_threads):  # X4
    problem = next(problems_of(op))
    tensors, options = build(problem, device)
    upstream = random_upstream(tensors, problem.packed)
    expected = call(op, tensors, options, upstream, True)
    torch.use_deterministic_algorithms(True)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same(expected, call(op, tensors, options, upstream))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_flag_is_never_rejected(op, device):  # X3
    problem = next(problems_of(op))
    tensors, options = build(problem, device)
    for deterministic in (None, False, True):
        call(op, tensors, options, random_upstream(tensors, problem.packed), deterministic)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, (13, 5)], ids=str)
def test_deterministic_over_head_dims(window, head_dim, device, more_threads):  # X2
    problem = Problem(
        dtype="fp16", batch=1, heads_q=4, len_q=100, len_k=100, head_dim=head_dim,
        head_dim_v=head_dim, causal=window is None, window=window, layout="blhd",
    )  # fmt: skip
    tensors, options = build(problem, device)
    upstream = random_upstream(tensors, packed=False)
    op = DENSE_OPS["flash"]
    first = call(op, tensors, options, upstream, True)
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        assert_same(first, call(op, tensors, options, upstream, True))


def test_many_batches_of_one_head_repeat(device, more_threads):  # X6, N18
    torch.set_num_threads(2)
    problem = Problem(batch=300, heads_q=1, heads_kv=1, len_q=64, len_k=16, head_dim=16)
    tensors, options = build(problem, device)
    upstream = random_upstream(tensors, packed=False)
    first = call(DENSE_OPS["flash"], tensors, options, upstream, True)
    for _ in range(10):
        assert_same(first, call(DENSE_OPS["flash"], tensors, options, upstream, True))


def test_batch_does_not_change_a_sequence(op, device):  # X7
    """A sequence gives the same bits alone and among others."""
    if op is flash_attention_varlen:
        lengths = ((70, 130), (1, 40), (129, 129))
        tensors, options = build(Problem(lengths=lengths, heads_q=4, causal=True), device)
        out = run(op, tensors, options)[0].out
        alone = [tensors[0][70:71], tensors[1][130:170], tensors[2][130:170]]
        cu = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (1, 40)]
        got = flashattn_ext.flash_attention_varlen(*alone, *cu, 1, 40, causal=True)
        assert torch.equal(got, out[70:71])
        return
    for dtype in ("bf16", "fp32"):
        tensors, _ = build(Problem(dtype=dtype, batch=5, heads_q=4, len_q=65, len_k=70), device)
        out = run(op, tensors, {})[0].out
        for b in range(5):
            alone = run(op, [tensor[b : b + 1] for tensor in tensors], {})[0].out
            assert torch.equal(alone, out[b : b + 1])
