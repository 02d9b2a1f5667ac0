"""Activation checkpointing, of every kind: the same gradients, dropout included."""

from __future__ import annotations

import functools

import pytest
import torch
from calls import attention_inputs
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashattn_ext
from flashattn_ext import sac_save_ops

ops = torch.ops.flashattn_ext


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves():
    tensors = [*attention_inputs(torch.float32, head_dim=8, head_dim_v=8), torch.randn(8, 8)]
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def block(query, key, value, weight):
    """Draws its dropout state inside."""
    out = flashattn_ext.flash_attention(query @ weight, key, value, dropout_p=0.4)
    return (out @ weight).sin()


def packed_block(query, key, value, weight):
    tensors = [x.transpose(1, 2).flatten(0, 1) for x in (query @ weight, key, value)]
    offsets = (torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10]))
    return flashattn_ext.flash_attention_varlen(*tensors, *offsets, 3, 5, dropout_p=0.4).sin()


def naive_block(query, key, value, weight):
    out = flashattn_ext.naive_attention(query @ weight, key, value, dropout_p=0.4)
    return (out @ weight).sin()


BLOCKS = {"dense": block, "packed": packed_block, "naive": naive_block}


def gradients(function, seed=3):
    torch.manual_seed(0)
    tensors = leaves()
    torch.manual_seed(seed)
    out = function(*tensors)
    following = torch.rand(())  # the generator goes on from the same place
    out.sum().backward()
    return [out, following, *[tensor.grad for tensor in tensors]]


def assert_same(function, twin):
    for a, b in zip(gradients(function), gradients(twin), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(gradients(twin)[0], gradients(twin, seed=4)[0])  # it does drop


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_state_drawn_inside(use_reentrant, name):  # R11, P2, P3
    function = BLOCKS[name]
    assert_same(lambda *args: checkpoint(function, *args, use_reentrant=use_reentrant), function)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_state_drawn_outside(use_reentrant, preserve):
    """Then nothing random is left inside, and the generator need not be preserved."""

    def attend(query, key, value, weight, rng_state):
        return flashattn_ext.flash_attention(
            query @ weight, key, value, dropout_p=0.4, rng_state=rng_state
        ).sin()

    def plain(*args):
        return attend(*args, flashattn_ext.reserve_rng("cpu"))

    def checkpointed(*args):
        state = flashattn_ext.reserve_rng("cpu")
        return checkpoint(
            attend, *args, state, use_reentrant=use_reentrant, preserve_rng_state=preserve
        )

    assert_same(checkpointed, plain)


def calls_of(function):
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Record():
        function(*leaves()).sum().backward()
    return seen


def test_selective():
    context = functools.partial(create_selective_checkpoint_contexts, sac_save_ops())

    def selective(*args):
        return checkpoint(block, *args, use_reentrant=False, context_fn=context)

    def everything(*args):
        return checkpoint(block, *args, use_reentrant=False)

    assert_same(selective, block)
    forward = ops.flash_attention_forward.default
    assert calls_of(everything).count(forward) == 2
    assert calls_of(selective).count(forward) == 1


def test_ops_to_save():
    assert ops.flash_attention_forward.default in sac_save_ops()
    assert ops.flash_attention_varlen_forward.default in sac_save_ops()
    assert all(isinstance(op, torch._ops.OpOverload) for op in sac_save_ops())


@pytest.mark.parametrize("name", BLOCKS)
def test_compiled(name):  # R11: the region is recomputed with the state of the first time
    function = BLOCKS[name]

    def checkpointed(*args):
        return checkpoint(function, *args, use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    assert_same(compiled, function)


def test_compiled_selective():
    context = functools.partial(create_selective_checkpoint_contexts, sac_save_ops())

    def selective(*args):
        return checkpoint(block, *args, use_reentrant=False, context_fn=context)

    assert_same(torch.compile(selective, backend="aot_eager", fullgraph=True), block)
