"""Derivatives of every function and option, of any order and in both modes."""

from __future__ import annotations

import pytest
import torch
from calls import (
    CALLS,
    DENSE,
    DENSE_FUNCTIONS,
    attention_call,
    attention_inputs,
    dense_call,
    packed_call,
)
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

import flashattn_ext
from flashattn_ext import reference

ops = torch.ops.flashattn_ext
every_call = pytest.mark.parametrize("name", CALLS)
# One call for each rule of its own, where the full grid would only be slow.
SOME_CALLS = [
    "flash_attention-everything",
    "naive_attention-everything",
    "flash_attention_varlen-everything",
    "merge_states",
    "softmax",
    "log_softmax",
]
some_calls = pytest.mark.parametrize("name", SOME_CALLS)


@every_call
def test_gradcheck(name):
    function, inputs = CALLS[name]()
    assert gradcheck(function, inputs, fast_mode=True)


@every_call
def test_gradgradcheck(name):  # O9
    function, inputs = CALLS[name]()
    assert gradgradcheck(function, inputs, fast_mode=True)


@every_call
def test_forward_mode(name):  # O9: right, or an error; never a silent zero
    function, inputs = CALLS[name]()
    assert gradcheck(
        function, inputs, fast_mode=True, check_forward_ad=True, check_backward_ad=False
    )


@some_calls
def test_gradcheck_entry_by_entry(name):
    function, inputs = CALLS[name]()
    assert gradcheck(function, inputs, check_batched_grad=True)


@some_calls
def test_forward_over_reverse(name):
    function, inputs = CALLS[name]()
    assert gradgradcheck(
        function,
        inputs,
        fast_mode=True,
        check_fwd_over_rev=True,
        check_rev_over_rev=False,
        check_undefined_grad=False,
    )


@pytest.mark.parametrize("name", ["flash_attention-softcap", "softmax"])
def test_third_derivative(name):
    function, inputs = CALLS[name]()

    def gradient(*args):
        out = function(*args)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out.sin().sum(), args[0], create_graph=True)[0]

    assert gradgradcheck(gradient, inputs, fast_mode=True)


@pytest.mark.parametrize("option", ["plain", "everything"])
@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("flash_attention", ops.flash_attention.lse),
        ("naive_attention", ops.naive_attention.lse_and_weights),
    ],
)
def test_ops_called_directly_are_differentiable(name, public, option):
    function, inputs = dense_call(name, option)
    direct, direct_inputs = dense_call(name, option)
    tensors = attention_inputs()
    direct = attention_call(public, tensors, DENSE[option], DENSE_FUNCTIONS[name]).function
    upstream = [torch.ones_like(result) for result in function(*inputs)]
    expected = torch.autograd.grad(function(*inputs), inputs, upstream)
    got = torch.autograd.grad(direct(*direct_inputs), direct_inputs, upstream)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_raw_ops_called_directly_are_differentiable():
    query, key, value = (tensor.requires_grad_() for tensor in attention_inputs())
    out, lse, *_ = ops.flash_attention_forward(query, key, value)
    got = torch.autograd.grad((out.sum() + lse.sum()), (query, key, value))
    out, lse = flashattn_ext.flash_attention(query, key, value, return_lse=True)
    expected = torch.autograd.grad((out.sum() + lse.sum()), (query, key, value))
    assert all(map(torch.equal, got, expected))


def test_softmax_op_called_directly_is_differentiable():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: ops.softmax(x, 0), x)
    assert gradgradcheck(lambda x: ops.log_softmax(x), x)


@pytest.mark.parametrize("level", ["no_grad", "inference_mode", "detached"])
def test_nothing_is_kept_without_gradients(level):
    query, key, value = attention_inputs()
    if level != "detached":
        query.requires_grad_()
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with context.get(level, torch.enable_grad)():
        out = flashattn_ext.flash_attention(query, key, value)
    assert out.grad_fn is None and not out.requires_grad


def test_tangents_reach_the_results_of_every_function():
    for name in SOME_CALLS:
        function, inputs = CALLS[name]()
        with dual_level():
            results = function(*[make_dual(x.detach(), torch.randn_like(x)) for x in inputs])
            results = results if isinstance(results, tuple) else (results,)
            for result in results:
                tangent = unpack_dual(result).tangent
                assert tangent is not None and tangent.count_nonzero() > 0, name


def test_a_tensor_passed_three_times():
    x = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)

    def attend(x):
        return flashattn_ext.flash_attention(x, x, x, softcap=2.0)

    assert gradcheck(attend, x, fast_mode=True)
    assert gradgradcheck(attend, x, fast_mode=True)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (2,)])
def test_results_that_are_not_used(used):
    query, key, value = (tensor.requires_grad_() for tensor in attention_inputs())
    results = flashattn_ext.naive_attention(query, key, value, return_lse=True, return_weights=True)
    twin = reference.attention(query, key, value)
    twin = (twin.out, twin.lse, twin.weights)
    inputs = (query, key, value)
    loss, expected = (sum(r[i].square().sum() for i in used) for r in (results, twin))
    got = torch.autograd.grad(loss, inputs, allow_unused=True)
    expected = torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)


def test_deterministic_follows_the_global_switch():
    """The switch that counts is that of the moment when backward runs."""
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is ops.flash_attention_backward.default:
                seen.append(args[-1])
            return func(*args, **(kwargs or {}))

    query, key, value = (tensor.requires_grad_() for tensor in attention_inputs())
    with Record():
        for switch, deterministic in ((True, None), (False, None), (True, False), (False, True)):
            out = flashattn_ext.flash_attention(query, key, value, deterministic=deterministic)
            torch.use_deterministic_algorithms(switch)
            try:
                out.sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
    assert seen == [True, False, False, True]


def test_saved_tensors_go_through_hooks():
    """Activation offloading sees everything that is kept."""
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    for function, inputs in (
        dense_call("flash_attention", "everything"),
        packed_call("everything"),
    ):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = function(*inputs)
        assert all(x.shape in packed for x in inputs[:3])
        expected = torch.autograd.grad(function(*inputs)[0].sum(), inputs)
        got = torch.autograd.grad(out.sum(), inputs)
        assert all(map(torch.equal, got, expected))
