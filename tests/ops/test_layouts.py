"""Any strides: the result is that of contiguous copies, and lies in memory in query's order."""

from __future__ import annotations

import pytest
import torch
from checks import DENSE_OPS, check_call, flash_attention_varlen, random_upstream, run
from layouts import EXPANSIONS, LAYOUTS, ORDERS, dense_strides_like, lay_out
from problems import Problem, build

pytestmark = pytest.mark.usefixtures("deterministic_algorithms")  # compared bit by bit

OPS = ("flash_attention_forward", "flash_attention_varlen_forward")
PLACES = ("query", "key", "value", "attn_mask")


@pytest.fixture(params=DENSE_OPS)
def op(request):
    return DENSE_OPS[request.param]


def problem_of(dtype="fp32", **options):
    return Problem(**{
        "dtype": dtype, "heads_q": 4, "len_k": 35, "head_dim": 24, "head_dim_v": 16,
        "mask": "float", "causal": True, "alignment": "bottom_right", **options,
    })  # fmt: skip


def same_as_contiguous(op, tensors, options, upstream):
    """Runs the call as given and on contiguous copies: bitwise equal results and gradients."""
    plain_options = {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    plain = run(
        op, [t.contiguous() for t in tensors], plain_options, [g.contiguous() for g in upstream]
    )
    got = run(op, tensors, options, upstream)
    assert torch.equal(got[0].out, plain[0].out) and torch.equal(got[0].lse, plain[0].lse)
    for name, gradient in got[1].items():
        assert torch.equal(gradient, plain[1][name]), name
    return got


@pytest.mark.parametrize("layout", LAYOUTS[1:] + EXPANSIONS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_argument_at_a_time(dtype, place, layout, op, device):  # L1, L2, L5, L6, L7, L9, S6
    tensors, options = build(problem_of(dtype), device)
    if place == "attn_mask":
        options["attn_mask"] = lay_out(options["attn_mask"], layout)
    else:
        index = PLACES.index(place)
        tensors[index] = lay_out(tensors[index], layout)
    upstream = random_upstream(tensors, packed=False)
    same_as_contiguous(op, tensors, options, upstream)
    check_call(op, tensors, options)


@pytest.mark.parametrize("layout", LAYOUTS + EXPANSIONS)
@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
def test_all_arguments_alike(dtype, layout, op, device):  # L2, L11, L13
    tensors, options = build(
        problem_of(dtype, batch=1 if layout == "odd_singletons" else 2), device
    )
    tensors = [lay_out(tensor, layout) for tensor in tensors]
    options["attn_mask"] = lay_out(options["attn_mask"], layout)
    check_call(op, tensors, options, layout="contiguous" if layout in EXPANSIONS else layout)


@pytest.mark.parametrize("layout", LAYOUTS[1:] + EXPANSIONS)
def test_upstream_gradients_of_any_layout(layout, op, device):  # L3, L4, X3
    tensors, options = build(problem_of(), device)
    upstream = random_upstream(tensors, packed=False)
    upstream = [
        lay_out(upstream[0], layout),
        lay_out(upstream[1], layout if layout != "expanded_3" else "blhd"),
    ]
    same_as_contiguous(op, tensors, options, upstream)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_backward_of_a_sum(dtype, op, device):  # L3: grad_out has stride 0 everywhere
    tensors, options = build(problem_of(dtype), device)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    op(*leaves, **options).out.sum().backward()
    ones = torch.ones(2, 4, 17, 16, dtype=leaves[0].dtype, device=device)
    _, expected = run(op, tensors, options, [ones, None])
    for leaf, name in zip(leaves, PLACES, strict=False):
        assert torch.equal(leaf.grad, expected[name])


def test_gradient_of_a_wide_view(op, device):  # L4: concatenation before a linear layer
    tensors, options = build(problem_of(), device)
    wide = torch.randn(2, 4, 17, 4096, device=device)
    upstream = [wide[..., 1000:1016], torch.randn(2, 4, 17, 3, device=device)[..., 1]]
    same_as_contiguous(op, tensors, options, upstream)


def test_slices_of_one_packed_projection(op, device):  # L10, L9: query, key and value in one tensor
    for heads_q, heads_kv in ((4, 4), (4, 1)):
        packed = torch.randn(2, 20, heads_q + 2 * heads_kv, 16, device=device)
        views = packed.transpose(1, 2).split([heads_q, heads_kv, heads_kv], dim=1)
        results, _ = check_call(op, list(views), {"causal": True})
        assert results.out.transpose(1, 2).is_contiguous()  # ready for the output projection


def test_heads_folded_into_the_last_dimension(op, device):
    flat = [torch.randn(2, length, 4 * 16, device=device) for length in (20, 30, 30)]
    views = [tensor.view(2, -1, 4, 16).transpose(1, 2) for tensor in flat]
    results, gradients = check_call(op, views, {})
    assert results.out.transpose(1, 2).flatten(2).stride() == (20 * 64, 64, 1)
    assert gradients["key"].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [(2, 4, 17, 16), (1, 4, 17, 16), (2, 1, 17, 16), (2, 4, 1, 16)], ids=str
)
def test_out_has_the_order_of_query(sizes, layout, op, device):  # L11, S6
    query = lay_out(torch.randn(sizes, device=device), layout)
    key = lay_out(torch.randn(sizes[0], sizes[1], 9, 16, device=device), "blhd")
    value = lay_out(torch.randn(sizes[0], sizes[1], 9, 5, device=device), "bhdl")
    results, gradients = check_call(op, [query, key, value], {})
    assert results.out.stride() == dense_strides_like(query, (*sizes[:3], 5))
    assert results.lse.is_contiguous() and results.max_logits.is_contiguous()
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        assert gradients[name].stride() == dense_strides_like(tensor, tensor.shape)


def test_singletons_with_odd_strides(op, device):  # S6
    for sizes in ((1, 1, 1, 1), (1, 1, 5, 8), (1, 3, 1, 8), (2, 1, 1, 1)):
        tensors = [lay_out(torch.randn(sizes, device=device), "odd_singletons") for _ in range(3)]
        check_call(op, tensors, {})


@pytest.mark.parametrize("layout", [*ORDERS, "sliced", "strided", "offset_by_one", *EXPANSIONS[:3]])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_packed_calls(dtype, layout, device):  # L4
    problem = Problem(dtype=dtype, lengths=((5, 9), (33, 20)), gap=2, heads_q=4, head_dim_v=8)
    tensors, options = build(problem, device)
    tensors = [lay_out(tensor, layout) for tensor in tensors]
    upstream = random_upstream(tensors, packed=True, layout=layout)
    same_as_contiguous(flash_attention_varlen, tensors, options, upstream)
    check_call(flash_attention_varlen, tensors, options)


def test_one_tensor_for_all_three(op, device):
    tensor = torch.randn(2, 3, 20, 8, device=device)
    check_call(op, [tensor, tensor, tensor], {"causal": True})
    leaf = tensor.requires_grad_()
    op(leaf, leaf, leaf).out.sum().backward()
    _, parts = run(op, [tensor] * 3, {}, [torch.ones_like(tensor), None])
    total = parts["query"] + parts["key"] + parts["value"]
    assert torch.allclose(leaf.grad, total, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_lists_and_slopes_with_strides(heads, op, device):
    problem = problem_of(
        heads_q=heads, heads_kv=1, alibi="batch", sinks="fp32", key_lengths=(60, 100)
    )
    tensors, options = build(problem, device)
    wide = {
        "alibi_slopes": torch.zeros(heads, 2, device=device).T.copy_(options["alibi_slopes"]),
        "sinks": torch.zeros(2 * heads, device=device)[::2].copy_(options["sinks"]),
        "key_lengths": torch.zeros(4, dtype=torch.int64, device=device)[::2].copy_(
            options["key_lengths"]
        ),
    }
    upstream = random_upstream(tensors, packed=False)
    same_as_contiguous(op, tensors, options | wide, upstream)
    for name in ("alibi_slopes", "sinks"):
        shared = options[name][..., :1].expand(options[name].shape)
        same_as_contiguous(op, tensors, options | {name: shared}, upstream)
