"""The drop-in in place of torch's function: modules, contexts, compile, script, export."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as functional
from functorch.compile import make_boxed_func
from sdpa_calls import calls_of, tensors, torch_attention
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn_ext import install, scaled_dot_product_attention, uninstall, use_as_sdpa

ops = torch.ops.flashattn_ext
SHAPE = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))


@pytest.fixture(autouse=True)
def torchs_own_again():
    torch._dynamo.reset()
    yield
    assert functional.scaled_dot_product_attention is torch_attention


def test_contexts_and_install():
    ours = scaled_dot_product_attention
    install()
    install()
    assert functional.scaled_dot_product_attention is ours
    with use_as_sdpa(), use_as_sdpa():
        uninstall()
        assert functional.scaled_dot_product_attention is ours
    assert functional.scaled_dot_product_attention is torch_attention
    with pytest.raises(KeyError), use_as_sdpa():
        raise KeyError
    uninstall()


def test_somebody_elses_function_stays(monkeypatch):
    def theirs(*args, **kwargs):
        return "theirs"

    monkeypatch.setattr(functional, "scaled_dot_product_attention", theirs)
    with use_as_sdpa():
        assert functional.scaled_dot_product_attention is scaled_dot_product_attention
    assert functional.scaled_dot_product_attention is theirs
    with use_as_sdpa():  # theirs comes later, and stays
        functional.scaled_dot_product_attention = theirs
    assert functional.scaled_dot_product_attention is theirs


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


def modules():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    return {
        "attention": (attention, (x, x, x), {"need_weights": False}),
        "attention, padded": (
            attention, (x, x, x), {"need_weights": False, "key_padding_mask": PADDING},
        ),
        "attention, causal": (
            attention, (x, x, x),
            {"need_weights": False, "attn_mask": causal, "is_causal": True},
        ),
        "encoder layer": (layer, (x,), {}),
        "encoder layer, padded": (layer, (x,), {"src_key_padding_mask": PADDING}),
        "encoder": (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (x,),
            {"src_key_padding_mask": PADDING},
        ),
        "decoder layer": (
            nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True), (x, x),
            {"tgt_mask": causal, "tgt_is_causal": True},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", modules())
def test_modules_of_torch(name, grad, training):
    """Eval without gradients is torch's fast path, which has kernels of its own."""
    module, args, kwargs = modules()[name]
    module.train(training)
    with torch.set_grad_enabled(grad):
        expected = module(*args, **kwargs)
        with use_as_sdpa():
            got = module(*args, **kwargs)
            seen = calls_of(module, *args, **kwargs)
    torch.testing.assert_close(got, expected)
    if training or grad:
        assert set(seen) == {"flashattn_ext.flash_attention_forward.default"}


def test_module_gradients():
    module, args, kwargs = modules()["encoder layer, padded"]
    results = []
    for context in (use_as_sdpa(), warnings.catch_warnings()):
        module.zero_grad()
        with context:
            module(*args, **kwargs).square().sum().backward()
        results.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["attention, padded", "encoder layer, padded", "decoder layer"])
def test_compiled_modules(name):  # O1
    module, args, kwargs = modules()[name]
    expected = module(*args, **kwargs)
    seen = []

    def forward_compiler(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=forward_compiler)
    with use_as_sdpa():
        got = torch.compile(module, backend=backend, fullgraph=True)(*args, **kwargs)
    torch.testing.assert_close(got, expected)
    assert ops.flash_attention_forward.default in seen


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
def test_compiled(options):
    inputs = tensors(*SHAPE)
    attend = functools.partial(scaled_dot_product_attention, **options)
    compiled = torch.compile(lambda *args: attend(*args), backend="aot_eager", fullgraph=True)
    torch.manual_seed(2)
    expected = attend(*inputs)
    torch.manual_seed(2)
    torch.testing.assert_close(compiled(*inputs), expected)


def test_compiled_for_other_ranks():
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for shape in (((3, 5, 8), (3, 7, 8), (3, 7, 8)), ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8))):
        inputs = tensors(*shape)
        torch.testing.assert_close(compiled(*inputs), scaled_dot_product_attention(*inputs))


def test_compiled_with_sdpa_kernel_inside():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(*args):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*args)

    inputs = [x.detach() for x in tensors(*SHAPE)]
    torch.testing.assert_close(attend(*inputs), torch_attention(*inputs))


def test_scripting_and_tracing():
    x = torch.randn(2, 6, 16)
    with use_as_sdpa(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.MultiheadAttention(16, 4))
        assert scripted(x, x, x)[0].shape == x.shape
        warnings.simplefilter("error", torch.jit.TracerWarning)
        inputs = [x.detach() for x in tensors(*SHAPE)]
        traced = torch.jit.trace(
            lambda *args: functional.scaled_dot_product_attention(*args), inputs
        )
    torch.testing.assert_close(traced(*inputs), torch_attention(*inputs))
    assert "aten::scaled_dot_product_attention" in str(traced.graph)


def test_export():
    class Model(nn.Module):
        def forward(self, query, key, value):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    inputs = tuple(x.detach() for x in tensors(*SHAPE))
    for strict in (False, True):
        with use_as_sdpa():
            program = torch.export.export(Model(), inputs, strict=strict).run_decompositions()
        targets = [node.target for node in program.graph.nodes]
        assert ops.flash_attention_forward.default in targets
        torch.testing.assert_close(program.module()(*inputs), Model()(*inputs))
