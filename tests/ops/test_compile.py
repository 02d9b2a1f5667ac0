"""torch.compile without a graph break, forward and backward, and torch.export."""

from __future__ import annotations

import shutil

import pytest
import torch
from calls import CALLS, attention_inputs, dense_call

import flashattn_ext

ops = torch.ops.flashattn_ext
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def leaves(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def assert_compiles(function, inputs, backend="aot_eager", compiled=None, **options):
    """Compiled and eager agree in results, strides and gradients."""
    if compiled is None:
        compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    got, expected = as_tuple(compiled(*inputs)), as_tuple(function(*inputs))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    gradients = [
        torch.autograd.grad(sum(result.sin().sum() for result in results), inputs)
        for results in (got, expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    return compiled


@pytest.mark.parametrize("name", CALLS)
def test_every_call(name):  # O1, O6
    function, inputs = CALLS[name]()
    assert_compiles(function, inputs)


@needs_compiler
@pytest.mark.parametrize(
    "name",
    ["flash_attention-everything", "naive_attention-sinks", "flash_attention_varlen-everything"],
)
def test_inductor(name):  # O1, O2
    function, inputs = CALLS[name](torch.float32)
    assert_compiles(function, inputs, backend="inductor")


LAYOUTS = {
    "blhd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize(
    ("layout", "len_k", "backend"),
    [
        *((layout, len_k, "aot_eager") for layout in LAYOUTS for len_k in (196, 257)),
        pytest.param("blhd", 257, "inductor", marks=needs_compiler),
    ],
)
def test_layouts(layout, len_k, backend):  # O2, O7
    """The views are made inside, where inductor may choose strides of its own for what it fuses."""
    inputs = leaves(attention_inputs(torch.float32, len_k=len_k, head_dim=8, head_dim_v=8))

    def attend(*tensors):
        query, key, value = (LAYOUTS[layout](tensor * 1.5) for tensor in tensors)
        return flashattn_ext.flash_attention(query, key, value, return_lse=True)

    assert_compiles(attend, inputs, backend=backend)


# Sizes that are equal by chance would become one symbol, and a guard.
ALL_DIFFERENT = {"heads_q": 16, "heads_kv": 8, "head_dim": 12, "head_dim_v": 13}


@pytest.mark.parametrize("option", ["plain", "causal", "half_window", "softcap"])
@pytest.mark.parametrize("name", ["flash_attention", "naive_attention"])
def test_dynamic_sizes(name, option):  # O1, O4, O7
    """One graph for every size."""
    function, _ = dense_call(name, option)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for len_q, len_k, batch in ((6, 9, 2), (11, 4, 3), (40, 33, 5)):
            tensors = attention_inputs(batch=batch, len_q=len_q, len_k=len_k, **ALL_DIFFERENT)
            assert_compiles(function, leaves(tensors), compiled=compiled)


def test_marked_dynamic():
    function, inputs = dense_call("flash_attention", "plain")
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 2)
    compiled = assert_compiles(function, inputs)
    assert_compiles(function, leaves(attention_inputs(len_q=9, len_k=14)), compiled=compiled)


def test_dynamic_packed():
    def attend(query, key, value, offsets, longest):
        return flashattn_ext.flash_attention_varlen(
            query, key, value, offsets, offsets, longest, longest, causal=True
        )

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((3, 5, 1), (7, 2, 9, 8, 1), (4, 5, 4, 6, 4, 4)):
            offsets = torch.tensor([0, *lengths]).cumsum(0).int()
            tensors = [torch.randn(sum(lengths), 2, 16, requires_grad=True) for _ in range(3)]
            results = [f(*tensors, offsets, max(lengths)) for f in (compiled, attend)]
            torch.testing.assert_close(*results)
            gradients = [torch.autograd.grad(out.square().sum(), tensors) for out in results]
            torch.testing.assert_close(*gradients)


def test_transforms_in_a_graph():
    def loss(*tensors):
        return flashattn_ext.flash_attention(*tensors, softcap=2.0).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))
    tensors = [torch.stack([tensor, -tensor, tensor / 2]) for tensor in attention_inputs()]
    compiled = torch.compile(per_sample, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), per_sample(*tensors))


@pytest.mark.parametrize("function", ["flash_attention", "naive_attention"])
def test_public_ops_in_a_graph(function):
    op = getattr(ops, function)

    def attend(*tensors):
        return op(*tensors, window=(None, 1), alignment="top_left", return_lse=True)

    assert_compiles(attend, leaves(attention_inputs()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_call_in_a_graph_draws_its_own_state(backend):  # R1, R2
    query, key, value = leaves(attention_inputs(torch.float32, len_q=16, len_k=16))

    @torch.compile(backend=backend, fullgraph=True)
    def twice(query, key, value):
        first, second = (
            flashattn_ext.flash_attention(query, key, value, dropout_p=0.5) for _ in range(2)
        )
        return first, second

    first, second = twice(query, key, value)
    assert not torch.equal(first, second)
    assert not torch.equal(first, twice(query, key, value)[0])
    # Linear in value: a backward that dropped other pairs would not give back the sum.
    (gradient,) = torch.autograd.grad(first.sum() + 2 * second.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), first.sum() + 2 * second.sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_manual_seed_reaches_a_graph(backend):
    tensors = attention_inputs(torch.float32, len_q=16, len_k=16)
    drop = torch.compile(
        lambda *args: flashattn_ext.flash_attention(*args, dropout_p=0.5),
        backend=backend,
        fullgraph=True,
    )
    results = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        results.append(drop(*tensors))
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def test_the_global_switch_of_determinism_recompiles():
    query, key, value = leaves(attention_inputs())
    attend = torch.compile(flashattn_ext.flash_attention, backend="aot_eager", fullgraph=True)
    for switch in (False, True):
        torch.use_deterministic_algorithms(switch)
        try:
            attend(query, key, value).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert query.grad is not None


def test_meta_tensors():
    query, key, value = (tensor.to("meta") for tensor in attention_inputs(torch.float16))
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse, max_logits = flashattn_ext.flash_attention(
        query, key, value, return_lse=True, return_max_logits=True
    )
    assert out.device.type == "meta" and out.dtype == torch.float16
    assert out.shape == (2, 4, 3, 4) and out.stride(1) == 4
    assert lse.shape == (2, 4, 3) and max_logits.shape == (2, 4)


BAD_SHAPES = {
    "key": lambda q, k, v: (q, k[..., :2], v),
    "value": lambda q, k, v: (q, k, v[:, :, :4]),
    "query": lambda q, k, v: (q[:, :3], k, v),
    "attn_mask": lambda q, k, v: (q, k, v, torch.ones(3, 6, dtype=torch.bool, device="meta")),
}


@pytest.mark.parametrize("argument", BAD_SHAPES)
def test_shape_errors_without_data(argument):
    tensors = [tensor.to("meta") for tensor in attention_inputs()]
    query, key, value, *mask = BAD_SHAPES[argument](*tensors)
    with pytest.raises(RuntimeError, match=f"flashattn_ext: {argument}: expected .* but got"):
        flashattn_ext.flash_attention(query, key, value, attn_mask=mask[0] if mask else None)


class Model(torch.nn.Module):
    def forward(self, query, key, value):
        out = flashattn_ext.flash_attention(
            query, key, value, causal=True, alignment="bottom_right", dropout_p=0.1
        )
        weights = flashattn_ext.naive_attention(query, key, value, return_weights=True)[1]
        return out, flashattn_ext.softmax(weights, 1)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):  # O5
    batch, len_q = torch.export.Dim("batch"), torch.export.Dim("len_q")
    shapes = ({0: batch, 2: len_q}, {0: batch}, {0: batch})
    program = torch.export.export(
        Model(), attention_inputs(), dynamic_shapes=shapes, strict=strict
    ).run_decompositions()
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert ops.flash_attention_forward.default in targets
    tensors = attention_inputs(batch=3, len_q=11)
    torch.manual_seed(3)
    got = program.module()(*tensors)
    torch.manual_seed(3)
    for a, b in zip(got, Model()(*tensors), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_length_that_comes_from_data(strict):  # O5
    class Selects(torch.nn.Module):
        def forward(self, query, tensor, mask, keep):
            index = keep.nonzero().squeeze(1)
            key, mask = tensor[:, :, index], mask[:, index]  # (2, 4, ?, 8), (5, ?)
            return (
                flashattn_ext.flash_attention(query, key, key, attn_mask=mask),
                flashattn_ext.naive_attention(query, key, key, attn_mask=mask),
                flashattn_ext.scaled_dot_product_attention(query, key, key, mask),
                flashattn_ext.flash_attention(
                    query, key, key, causal=True, alignment="bottom_right"
                ),
                flashattn_ext.softmax(key, 2),
            )

    tensors = (torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(5, 9))
    keep = torch.arange(9) % 3 > 0
    program = torch.export.export(Selects(), (*tensors, keep), strict=strict)
    torch.testing.assert_close(program.module()(*tensors, ~keep), Selects()(*tensors, ~keep))


def test_export_of_a_packed_length_that_comes_from_data():  # O5
    class Selects(torch.nn.Module):
        def forward(self, tensor, keep, offsets):
            rows = tensor[keep.nonzero().squeeze(1)]  # (?, heads, head_dim)
            return flashattn_ext.flash_attention_varlen(rows, rows, rows, offsets, offsets, 3, 3)

    tensor, keep = torch.randn(9, 2, 8), torch.arange(9) % 3 > 0
    offsets = torch.tensor([0, 1, 3])
    program = torch.export.export(Selects(), (tensor, keep, offsets))
    torch.testing.assert_close(
        program.module()(tensor, ~keep, offsets), Selects()(tensor, ~keep, offsets)
    )
