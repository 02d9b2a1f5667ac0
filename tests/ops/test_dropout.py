"""Dropout in the attention ops: the bits, the state, and that backward sees the same ones."""

from __future__ import annotations

import formula
import pytest
import torch
from checks import DENSE_OPS, check, check_call, flash_attention_varlen, run
from problems import DTYPES, Problem, build

import flashattn_ext

OPS = ("flash_attention_forward", "flash_attention_varlen_forward")


@pytest.fixture(params=DENSE_OPS)
def op(request):
    return DENSE_OPS[request.param]


def state(seed, offset, device="cpu"):
    return torch.tensor([seed, offset], dtype=torch.int64, device=device)


def kept_by_forward(op, rng_state, batch, heads, len_q, len_k, dropout_p, **options):
    """Which pairs forward keeps: with equal scores and V the identity, out is the kept pairs."""
    device = rng_state.device
    query = torch.zeros(batch, heads, len_q, 4, device=device)
    key = torch.zeros(batch, heads, len_k, 4, device=device)
    value = torch.eye(len_k, device=device).expand(batch, heads, len_k, len_k)
    options = {"rng_state": rng_state, "dropout_p": dropout_p, **options}
    return (run(op, [query, key, value], options)[0].out != 0).cpu()


def kept_by_backward(op, rng_state, batch, heads, len_q, len_k, dropout_p):
    """Which pairs backward keeps: with one-hot rows of grad_out, they are the grad of value."""
    device = rng_state.device
    query = torch.zeros(batch, heads, len_q, 4, device=device)
    key = torch.zeros(batch, heads, len_k, 4, device=device)
    value = torch.zeros(batch, heads, len_k, len_q, device=device)
    grad_out = torch.eye(len_q, device=device).expand(batch, heads, len_q, len_q)
    options = {"rng_state": rng_state, "dropout_p": dropout_p}
    _, gradients = run(op, [query, key, value], options, [grad_out, None], wanted=["value"])
    return (gradients["value"].transpose(2, 3) != 0).cpu()


def exact_bits(rng_state, batch, heads, len_q, len_k, dropout_p):
    return torch.stack([
        formula.keep_mask(rng_state, b, heads, len_q, len_k, dropout_p) for b in range(batch)
    ])  # fmt: skip


STATES = [(0, 0), (1, 0), (0, 1), (-1, -1), (2**63 - 1, -(2**63)), (123456789012, 2**32 - 1)]
SIZES = [(2, 3, 17, 33), (1, 1, 1, 1), (1, 2, 130, 200), (3, 1, 64, 64), (2, 5, 5, 31)]


@pytest.mark.parametrize("seed, offset", STATES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_of_both_directions(sizes, seed, offset, op, device):  # R3, R5, R7
    rng_state = state(seed, offset, device)
    expected = exact_bits(rng_state, *sizes, 0.4)
    assert torch.equal(kept_by_forward(op, rng_state, *sizes, 0.4), expected)
    assert torch.equal(kept_by_backward(op, rng_state, *sizes, 0.4), expected)
    mask = flashattn_ext.dropout_mask(rng_state, *sizes, 0.4)
    assert mask.dtype == torch.bool and torch.equal(mask.cpu(), expected)


def test_bits_do_not_depend_on_anything_else(device):  # R3
    sizes, rng_state = (2, 2, 40, 70), state(5, 9, device)
    expected = exact_bits(rng_state, *sizes, 0.3)
    causal = torch.ones(40, 70, dtype=torch.bool).tril(30)
    for op in DENSE_OPS.values():
        options = {"causal": True, "alignment": "bottom_right"}
        assert torch.equal(
            kept_by_forward(op, rng_state, *sizes, 0.3, **options), expected & causal
        )
        for lengths in ((70, 33), (1, 0)):
            used = torch.tensor(lengths, device=device)
            seen = torch.arange(70) < used.cpu().view(2, 1, 1, 1)
            got = kept_by_forward(op, rng_state, *sizes, 0.3, key_lengths=used)
            assert torch.equal(got, expected & seen)


def test_bits_of_a_longer_call_begin_with_those_of_a_shorter(op, device):
    rng_state = state(11, 3, device)
    long = kept_by_forward(op, rng_state, 3, 2, 130, 150, 0.5)
    assert torch.equal(kept_by_forward(op, rng_state, 2, 2, 65, 31, 0.5), long[:2, :, :65, :31])


def test_packed_and_padded_drop_the_same(device):
    lengths, rng_state = [(5, 33), (0, 7), (64, 64), (17, 1)], state(77, 2, device)
    sequences, heads, most = len(lengths), 2, 64
    expected = exact_bits(rng_state, sequences, heads, most, most, 0.35)
    for gap in (0, 3):
        problem = Problem(lengths=tuple(lengths), gap=gap, head_dim=4, head_dim_v=most)
        (query, key, value), options = build(problem, device)
        query, key, value = query * 0, key * 0, value * 0
        begins = options["cu_seqlens_k"].tolist()
        for begin, (_, len_k) in zip(begins, lengths, strict=False):
            value[begin : begin + len_k] = torch.eye(most, device=device)[:len_k, None]
        options |= {"rng_state": rng_state, "dropout_p": 0.35}
        out = run(flash_attention_varlen, [query, key, value], options)[0].out
        begins = options["cu_seqlens_q"].tolist()
        for n, (len_q, len_k) in enumerate(lengths):
            got = out[begins[n] : begins[n] + len_q, :, :len_k].transpose(0, 1) != 0
            assert torch.equal(got.cpu(), expected[n, :, :len_q, :len_k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.999])
def test_against_the_formula(dropout_p, dtype, op, device):  # R3, R4
    problem = Problem(
        dtype=dtype, dropout_p=dropout_p, heads_q=4, head_dim=16, causal=True,
        alignment="bottom_right", sinks="fp32",
    )  # fmt: skip
    check(op, problem, device)


def test_lse_is_that_without_dropout(op, device):  # R4
    tensors, options = build(Problem(dropout_p=0.6, causal=True, alignment="top_left"), device)
    with_dropout = run(op, tensors, options)[0]
    without = run(op, tensors, options | {"dropout_p": 0.0})[0]
    assert torch.equal(with_dropout.lse, without.lse)
    assert torch.equal(with_dropout.max_logits, without.max_logits)
    assert not torch.equal(with_dropout.out, without.out)


def test_whole_rows_dropped(op, device):  # R4: short causal rows often lose every key
    problem = Problem(dropout_p=0.95, causal=True, alignment="top_left", len_q=33, heads_q=8)
    results, gradients = check(op, problem, device)
    assert (results.out.abs().sum(-1) == 0).any()
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rate_one_gives_zeros(dtype, op, device):  # R14
    tensors, options = build(Problem(dtype=dtype, sinks="fp32"), device)
    options |= {"dropout_p": 1.0, "rng_state": state(3, 4, device)}
    results, gradients = check_call(op, tensors, options)
    assert not results.out.count_nonzero()
    assert not gradients["value"].count_nonzero()
    upstream = [torch.ones_like(results.out), None]
    _, gradients = run(op, tensors, options, upstream)
    assert not any(gradient.count_nonzero() for gradient in gradients.values())


def test_rate_zero_draws_nothing_and_ignores_the_state(op, device):  # R12, R13
    tensors, _ = build(Problem(), device)
    plain = run(op, tensors, {})[0].out
    torch.manual_seed(4)
    expected = torch.rand(3, device=device)
    torch.manual_seed(4)
    assert torch.equal(run(op, tensors, {"dropout_p": 0.0})[0].out, plain)
    assert torch.equal(torch.rand(3, device=device), expected)
    with_state = run(op, tensors, {"dropout_p": 0.0, "rng_state": state(1, 2, device)})[0].out
    assert torch.equal(with_state, plain)


@pytest.mark.parametrize("dropout_p", [2**-18, 1e-9])
def test_a_rate_below_the_resolution_drops_nothing(dropout_p, op, device):
    rng_state = state(8, 8, device)
    assert kept_by_forward(op, rng_state, 1, 2, 64, 64, dropout_p).all()


@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.17, 0.5, 0.9])
def test_the_rate_is_met(dropout_p, device):  # R6: no rounding of p to 1/256
    keep = flashattn_ext.dropout_mask(state(21, 0, device), 4, 16, 256, 256, dropout_p)
    pairs, kept = keep.numel(), keep.sum().item()
    deviation = (pairs * dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(pairs - kept - pairs * dropout_p) < 5 * deviation + pairs * 2**-17
    for dim in range(4):  # and along every dimension
        others = [d for d in range(4) if d != dim]
        rates = 1 - keep.double().mean(dim=others)
        spread = (dropout_p * (1 - dropout_p) * keep.shape[dim] / pairs) ** 0.5
        assert (rates - dropout_p).abs().max() < 5.5 * spread + 2**-17


def test_neighbours_are_independent(device):
    keep = flashattn_ext.dropout_mask(state(5, 5, device), 8, 8, 128, 128, 0.5).double() * 2 - 1
    for dim in range(4):
        for step in (1, 2, 4):
            size = keep.shape[dim] - step
            product = keep.narrow(dim, 0, size) * keep.narrow(dim, step, size)
            assert abs(product.mean().item()) < 5.5 / product.numel() ** 0.5


def test_each_call_draws_its_own_state(op, device):  # R1, R2
    tensors, _ = build(Problem(), device)
    torch.manual_seed(6)
    untouched = torch.rand(2, device=device)
    torch.manual_seed(6)
    first = run(op, tensors, {"dropout_p": 0.5})[0].out
    second = run(op, tensors, {"dropout_p": 0.5})[0].out
    assert not torch.equal(first, second)
    assert not torch.equal(torch.rand(2, device=device), untouched)
    torch.manual_seed(6)
    assert torch.equal(run(op, tensors, {"dropout_p": 0.5})[0].out, first)


def test_fork_rng_and_reserved_states(op, device):  # R7, R8
    tensors, _ = build(Problem(), device)
    torch.manual_seed(9)
    with torch.random.fork_rng():
        inside = run(op, tensors, {"dropout_p": 0.5})[0].out
    assert torch.equal(run(op, tensors, {"dropout_p": 0.5})[0].out, inside)
    torch.manual_seed(9)
    reserved = flashattn_ext.reserve_rng(device)
    assert reserved.dtype == torch.int64 and reserved.shape == (2,)
    assert reserved.device.type == torch.device(device).type
    before = reserved.clone()
    given = [run(op, tensors, {"dropout_p": 0.5, "rng_state": reserved})[0].out for _ in range(2)]
    assert torch.equal(given[0], given[1]) and torch.equal(given[0], inside)
    assert torch.equal(reserved, before)


def test_a_strided_state(op, device):
    tensors, _ = build(Problem(), device)
    wide = torch.tensor([3, 0, 9, 0], device=device)
    a = run(op, tensors, {"dropout_p": 0.5, "rng_state": wide[::2]})[0].out
    assert torch.equal(
        a, run(op, tensors, {"dropout_p": 0.5, "rng_state": state(3, 9, device)})[0].out
    )


def test_backward_uses_the_drawn_state(op, device):  # R3
    """With a state drawn inside the call: out is linear in V, so <out, g> = <V, grad of V>."""
    tensors, _ = build(Problem(dtype="fp64", heads_q=4, len_k=70), device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    results = op(*leaves, dropout_p=0.5)
    grad_out = torch.randn_like(results.out)
    (gradient,) = torch.autograd.grad(results.out, [leaves[2]], grad_out)
    assert torch.allclose((results.out * grad_out).sum(), (leaves[2] * gradient).sum())
