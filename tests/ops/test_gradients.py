"""Gradients: all, only those asked for, through lse, reduced over whatever was broadcast."""

from __future__ import annotations

import functools

import pytest
import torch
from checks import (
    DENSE_OPS,
    check,
    check_call,
    flash_attention,
    flash_attention_varlen,
    random_upstream,
    run,
)
from problems import DTYPES, MASK_SHAPES, Problem, build, mask_sizes
from tolerances import assert_close

import flashattn_ext

pytestmark = pytest.mark.usefixtures("deterministic_algorithms")  # compared bit by bit

OPS = ("flash_attention_forward", "flash_attention_backward")
NAMES = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks")


@pytest.fixture(params=DENSE_OPS)
def op(request):
    return DENSE_OPS[request.param]


def everything(**options):
    return Problem(**{
        "heads_q": 4, "head_dim": 8, "head_dim_v": 12, "mask": "float", "alibi": "batch",
        "sinks": "fp32", "softcap": 4.0, "alignment": "bottom_right", "causal": True, **options,
    })  # fmt: skip


@pytest.mark.parametrize("wanted", [*NAMES, "all", "query value", "key sinks", "attn_mask sinks"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_only_what_is_asked_for(dtype, wanted, op, device):  # P6, M3
    tensors, options = build(everything(dtype=dtype), device)
    upstream = random_upstream(tensors, packed=False)
    _, every = run(op, tensors, options, upstream)
    names = NAMES if wanted == "all" else wanted.split()
    _, some = run(op, tensors, options, upstream, wanted=names)
    assert set(some) == set(names)
    for name, gradient in some.items():
        assert torch.equal(gradient, every[name]), name


@pytest.mark.parametrize("wanted", ["query", "key", "value", "alibi_slopes", "sinks"])
def test_only_what_is_asked_for_packed(wanted, device):  # P6
    problem = Problem(lengths=((5, 9), (17, 3)), alibi="heads", sinks="fp16", head_dim=8)
    tensors, options = build(problem, device)
    upstream = random_upstream(tensors, packed=True)
    _, every = run(flash_attention_varlen, tensors, options, upstream)
    _, some = run(flash_attention_varlen, tensors, options, upstream, wanted=[wanted])
    assert torch.equal(some[wanted], every[wanted])


def test_leaves_without_requires_grad_get_none(op, device):  # P6
    tensors, _ = build(Problem(), device)
    tensors[1].requires_grad_()
    op(*tensors).out.sum().backward()
    assert tensors[0].grad is None and tensors[2].grad is None
    assert tensors[1].grad is not None


@pytest.mark.parametrize("part", ["out", "lse"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_through_one_result_alone(dtype, part, op, device):
    """z-loss and ring attention differentiate lse; most losses only out."""
    for sinks in (None, "fp32"):
        tensors, options = build(everything(dtype=dtype, sinks=sinks), device)
        upstream = random_upstream(tensors, packed=False)
        alone = [upstream[0], None] if part == "out" else [None, upstream[1]]
        both = [
            g if g is not None else torch.zeros_like(u)
            for g, u in zip(alone, upstream, strict=True)
        ]
        results, gradients = run(op, tensors, options, alone)
        _, expected = run(op, tensors, options, both)
        for name, gradient in gradients.items():
            if gradient is None:
                assert not expected[name].count_nonzero()
            else:
                assert torch.equal(gradient, expected[name]), name
        assert results.out.requires_grad and results.lse.requires_grad  # P5


def test_every_path_has_a_grad_fn(op, device):  # P5
    for options in ({}, {"len_k": 0}, {"len_q": 0}, {"batch": 0}, {"key_lengths": (0, 0)}):
        tensors, kwargs = build(Problem(**options), device)
        leaf = tensors[0].requires_grad_()
        results = op(*tensors, **kwargs)
        assert results.out.requires_grad and results.out.grad_fn is not None
        results.out.sum().backward()
        assert leaf.grad is not None and not torch.isnan(leaf.grad).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes_follow_the_inputs(dtype, op, device):  # T5
    for mask, sinks in (("float", "fp16"), ("fp32", "bf16"), ("fp32", "fp64")):
        _, gradients = check(op, everything(dtype=dtype, mask=mask, sinks=sinks), device)
        assert set(gradients) == set(NAMES)


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_mask_gradient_is_reduced_over_broadcast(dtype, shape, op, device):  # M4, M3
    problem = everything(dtype=dtype, mask="fp32", mask_shape=shape, batch=3, alibi=None)
    tensors, options = build(problem, device)
    _, gradients = check_call(op, tensors, options)
    assert gradients["attn_mask"].shape == torch.Size(mask_sizes(problem))
    assert gradients["attn_mask"].is_contiguous()


@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_mask_gradient_over_several_tiles(shape, op, device):  # M4
    problem = Problem(
        dtype="fp32", batch=2, heads_q=4, heads_kv=2, head_dim=8, mask="float", mask_shape=shape,
        len_q=140, len_k=600, key_lengths=(100, 7), causal=True, alignment="top_left",
    )  # fmt: skip
    check(op, problem, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", ["bhqk", "1hqk", "b1qk", "11qk", "qk", "bh1k", "111k"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_mask_gradient_without_other_terms(head_dim, shape, deterministic, device):  # M4
    op = functools.partial(DENSE_OPS["flash"], deterministic=deterministic)
    for dtype, mask in (("bf16", "float"), ("fp16", "float_rows"), ("bf16", "fp32")):
        problem = Problem(
            dtype=dtype, batch=3, heads_q=4, heads_kv=2, len_q=90, len_k=136, head_dim=head_dim,
            head_dim_v=head_dim, mask=mask, mask_shape=shape, causal=True, alignment="bottom_right",
        )  # fmt: skip
        tensors, options = build(problem, device)
        check_call(op, tensors, options)


def test_mask_gradient_of_an_expanded_mask_is_not_reduced(op, device):  # M4, L2
    tensors, _ = build(Problem(heads_q=4, head_dim=8), device)
    mask = torch.randn(1, 1, 17, 33, device=device).expand(2, 4, 17, 33)
    _, gradients = check_call(op, tensors, {"attn_mask": mask})
    assert gradients["attn_mask"].shape == (2, 4, 17, 33)


def test_relative_position_bias_trains(device):  # M4: gradients reach what the bias was made of
    tensors, _ = build(Problem(heads_q=4, len_q=20, len_k=20, head_dim=8), device)
    table = torch.randn(4, 39, device=device, requires_grad=True)
    index = torch.arange(20, device=device)
    bias = table[:, index[None] - index[:, None] + 19]
    flashattn_ext.flash_attention(*tensors, attn_mask=bias).square().sum().backward()
    exact = table.detach().double().requires_grad_()
    query, key, value = (tensor.double() for tensor in tensors)
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = query @ key.transpose(2, 3) / 8**0.5 + exact[:, index[None] - index[:, None] + 19]
    (scores.softmax(-1) @ value).square().sum().backward()
    assert_close("table", table.grad, exact.grad, None, torch.float32)


@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (12, 3)], ids=str)
def test_key_gradients_are_summed_over_the_group(heads, op, device):  # G6, G2, G3
    heads_q, heads_kv = heads
    problem = Problem(dtype="fp64", heads_q=heads_q, heads_kv=heads_kv, head_dim=8, head_dim_v=5)
    tensors, _ = build(problem, device)
    upstream = random_upstream(tensors, packed=False)
    _, grouped = run(op, tensors, {}, upstream)
    group = heads_q // heads_kv
    repeated = [tensors[0], *(t.repeat_interleave(group, 1) for t in tensors[1:])]
    _, single = run(op, repeated, {}, upstream)
    assert torch.allclose(grouped["query"], single["query"], atol=1e-12)
    for name in ("key", "value"):
        expected = single[name].unflatten(1, (heads_kv, group)).sum(2)
        assert torch.allclose(grouped[name], expected, atol=1e-12), name


@pytest.mark.parametrize("softcap", [0.1, 1.0, 50.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(dtype, softcap, op, device):  # K1: the slope 1 - tanh^2 is there
    problem = Problem(dtype=dtype, softcap=softcap, scale=1.0, head_dim=16, causal=True, len_k=17)
    check(op, problem, device)


def test_softcap_of_huge_scores(op, device):  # K1, N12
    tensors, _ = build(Problem(dtype="fp16", head_dim=64), device)
    tensors = [tensors[0] * 300, tensors[1] * 300, tensors[2]]
    check_call(op, tensors, {"softcap": 20.0})


@pytest.mark.parametrize("heads_q", [1, 3, 7, 12])  # head counts that are no power of two
@pytest.mark.parametrize("kind", ["heads", "batch"])
def test_alibi_equals_an_explicit_bias(kind, heads_q, op, device):  # K3
    for alignment, len_q in (("top_left", 20), ("bottom_right", 20), ("bottom_right", 50)):
        problem = Problem(heads_q=heads_q, heads_kv=1, len_q=len_q, alibi=kind, alignment=alignment)
        tensors, options = build(problem, device)
        slopes = options["alibi_slopes"]
        shift = 33 - len_q if alignment == "bottom_right" else 0
        distance = torch.arange(len_q).view(-1, 1) + shift - torch.arange(33)
        bias = -slopes.view(-1, heads_q, 1, 1) * distance.abs().to(device)
        a, b = (run(op, tensors, o)[0] for o in (options, {"attn_mask": bias}))
        assert_close("out", a.out, b.out.double(), None, torch.float32)
        check_call(op, tensors, options)


@pytest.mark.parametrize("sinks", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype, sinks, op, device):  # K4
    check(op, Problem(dtype=dtype, sinks=sinks, heads_q=6, mask="bool_rows"), device)


@pytest.mark.parametrize("size", [100.0, -100.0])
def test_extreme_sinks(size, op, device):
    tensors, _ = build(Problem(heads_q=4), device)
    check_call(op, tensors, {"sinks": torch.full((4,), size, device=device)})
    mixed = torch.tensor([size, 0.0, -float("inf"), 3.0], device=device)
    check_call(op, tensors, {"sinks": mixed})


@pytest.mark.parametrize("mask", ["finfo_min_rows", "float_rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_masks(mask, dtype, op, device):  # N4, N1
    check(
        op, Problem(dtype=dtype, mask=mask, heads_q=4, alibi="heads", alignment="top_left"), device
    )


@pytest.mark.parametrize("bias", [-100.0, -113.0, 120.0])
@pytest.mark.parametrize("length", [64, 192])
def test_lse_outside_the_range_of_exp(length, bias, device):  # N10, N11, X2
    for deterministic in (False, True):
        problem = Problem(dtype="bf16", len_q=length, len_k=length, heads_q=4, head_dim=64)
        tensors, _ = build(problem, device)
        mask = torch.full((length, length), bias, device=device)
        options = {"attn_mask": mask, "deterministic": deterministic}

        def op(*args, deterministic=deterministic, **named):
            return flash_attention(*args, deterministic=deterministic, **named)

        options.pop("deterministic")
        check_call(op, tensors, options)


def test_shape_20x4x4x32_is_reproducible(device):  # N19
    tensors, _ = build(Problem(batch=20, heads_q=4, heads_kv=4, len_q=4, len_k=4), device)
    upstream = random_upstream(tensors, packed=False)

    def once():
        return run(flash_attention, tensors, {}, upstream)[1]

    first = once()
    for _ in range(5):
        again = once()
        for name, gradient in first.items():
            assert torch.isfinite(gradient).all() and torch.equal(gradient, again[name])


def test_accumulating_into_grad(op, device):
    """Two backward passes add up, also in 16 bits and for transposed leaves."""
    tensors, _ = build(Problem(dtype="bf16", layout="blhd"), device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    for times in (1, 2):
        op(*leaves).out.sum().backward()
        if times == 1:
            once = [leaf.grad.clone() for leaf in leaves]
    for leaf, gradient in zip(leaves, once, strict=True):
        assert torch.equal(leaf.grad, gradient + gradient)


def test_saved_tensors_may_be_moved_and_copied(op, device):  # L8: strides are lost on the way
    tensors, options = build(everything(layout="bhdl", dropout_p=0.2), device)
    upstream = random_upstream(tensors, packed=False)
    _, expected = run(op, tensors, options, upstream)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.cpu().contiguous(), lambda t: t.to(device)
    ):
        _, gradients = run(op, tensors, options, upstream)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


def test_modified_inputs_are_noticed(device):
    """Backward needs the inputs as they were: changing one in between is an error."""
    tensors, _ = build(Problem(), device)
    leaf = tensors[0].requires_grad_()
    out = flashattn_ext.flash_attention(*tensors)
    tensors[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert leaf.grad is None
