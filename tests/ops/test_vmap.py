"""torch.func over every function: equal to a loop, and to the transforms of the formula."""

from __future__ import annotations

import pytest
import torch
from calls import CALLS, RNG_STATE, attention_inputs, random_tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import flashattn_ext
from flashattn_ext import reference

ops = torch.ops.flashattn_ext
SIZE = 3
FUNCTIONS = {
    "flash_attention": flashattn_ext.flash_attention,
    "naive_attention": flashattn_ext.naive_attention,
    "op": ops.flash_attention,
}


@pytest.fixture(params=FUNCTIONS)
def attend(request):
    return FUNCTIONS[request.param]


def formula(*tensors, **options):
    return reference.attention(*tensors, **options).out


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def mapped(*tensors, dim=0):
    """Each tensor with a new dimension of different entries, at `dim`."""
    return tuple(
        torch.stack([tensor * (i + 1) / 2 for i in range(SIZE)], dim) for tensor in tensors
    )


def looped(function, in_dims, *args):
    """What vmap stands for."""
    entries = [
        [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
        for i in range(SIZE)
    ]
    results = [function(*entry) for entry in entries]
    if isinstance(results[0], tuple):
        return tuple(map(torch.stack, zip(*results, strict=True)))
    return torch.stack(results)


def assert_maps(function, in_dims, *args):
    close(vmap(function, in_dims)(*args), looped(function, in_dims, *args))


@pytest.mark.parametrize("name", CALLS)
def test_every_call(name):  # O8
    function, inputs = CALLS[name]()
    assert_maps(function, (0,) * len(inputs), *mapped(*[x.detach() for x in inputs]))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_every_call(name):
    function, inputs = CALLS[name]()

    def loss(*args):
        results = function(*args)
        results = results if isinstance(results, tuple) else (results,)
        return sum(result.sin().sum() for result in results)

    gradient = grad(loss, tuple(range(len(inputs))))
    assert_maps(gradient, (0,) * len(inputs), *mapped(*[x.detach() for x in inputs]))


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 0), (1, 3, 4)])
def test_some_arguments_mapped(in_dims, attend):
    tensors = [
        tensor if dim is None else mapped(tensor, dim=dim)[0]
        for tensor, dim in zip(attention_inputs(), in_dims, strict=True)
    ]
    assert_maps(attend, in_dims, *tensors)

    def loss(*args):
        return attend(*args).square().sum()

    assert_maps(grad(loss, (0, 1, 2)), in_dims, *tensors)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (4, 1, 1), (2, 1, 3, 5), (2, 4, 3, 5)])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
def test_masks(shape, kind, in_dims, attend):
    query, key, value = attention_inputs()
    mask = random_tensor(*shape)
    tensors = [
        tensor if dim is None else mapped(tensor, dim=dim)[0]
        for tensor, dim in zip((query, mask), in_dims, strict=True)
    ]
    if kind == "bool":
        tensors[1] = tensors[1] > 0

    def call(query, mask):
        return attend(query, key, value, attn_mask=mask)

    assert_maps(call, in_dims, *tensors)
    if kind == "float":
        gradient = grad(lambda q, m: call(q, m).square().sum(), (0, 1))
        assert_maps(gradient, in_dims, *tensors)


def test_key_lengths_mapped(attend):
    query, key, value = attention_inputs()
    lengths = torch.tensor([[0, 5], [3, 1], [2, 2]])
    assert_maps(lambda q, n: attend(q, key, value, key_lengths=n), (0, 0), *mapped(query), lengths)


def test_one_call_where_entries_fold_into_the_batch():
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Count():
        vmap(flashattn_ext.flash_attention)(*mapped(*attention_inputs()))
    assert calls.count(ops.flash_attention_forward.default) == 1


def test_nested(attend):
    tensors = mapped(*attention_inputs())
    tensors = [torch.stack([tensor, -tensor], 1) for tensor in tensors]
    got = vmap(vmap(attend, (0, None, 0)), (0, 0, 0))(tensors[0], tensors[1][:, 0], tensors[2])
    for i in range(SIZE):
        for j in range(2):
            close(got[i, j], attend(tensors[0][i, j], tensors[1][i, 0], tensors[2][i, j]))


def test_the_bits_of_a_shared_state(attend):
    """A loop with one rng_state drops the same pairs in every entry; so does vmap."""
    options = {"dropout_p": 0.4, "rng_state": torch.tensor(RNG_STATE)}
    tensors = [tensor.expand(SIZE, *tensor.shape) for tensor in attention_inputs()]
    out = vmap(lambda *args: attend(*args, **options))(*tensors)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
    close(out[0], attend(*attention_inputs(), **options))


@pytest.mark.parametrize("draw", [flashattn_ext.reserve_rng, ops.reserve_rng])
def test_randomness(draw):
    def states(randomness):
        return vmap(lambda x: draw("cpu") + x, randomness=randomness)(torch.zeros(SIZE, dtype=int))

    assert states("different").unique(dim=0).size(0) == SIZE
    assert states("same").unique(dim=0).size(0) == 1
    with pytest.raises(RuntimeError, match="randomness"):
        states("error")


def test_randomness_of_attention(attend):
    tensors = [tensor.expand(SIZE, *tensor.shape) for tensor in attention_inputs()]

    def drop(*args):
        return attend(*args, dropout_p=0.5)

    different = vmap(drop, randomness="different")(*tensors)
    assert not torch.equal(different[0], different[1])
    same = vmap(drop, randomness="same")(*tensors)
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(drop)(*tensors)


TRANSFORMS = {
    "grad": lambda loss: grad(loss, (0, 1, 2)),
    "vjp": lambda loss: lambda *args: vjp(loss, *args)[1](torch.ones((), dtype=torch.float64)),
    "jvp": lambda loss: lambda *args: jvp(loss, args, args),
    "jacrev": lambda loss: jacrev(loss, (0, 2)),
    "jacfwd": lambda loss: jacfwd(loss, 1),
    "hessian": lambda loss: hessian(loss, 0),
    "jacrev of jacrev": lambda loss: jacrev(jacrev(loss, 0), 1),
    "jacrev of grad": lambda loss: jacrev(grad(loss, 0), 2),
    "jacfwd of jacfwd": lambda loss: jacfwd(jacfwd(loss, 0), 0),
    "grad of grad": lambda loss: grad(lambda *args: grad(loss)(*args).square().sum()),
    "three levels": lambda loss: grad(
        lambda *args: grad(lambda *args: grad(loss)(*args).square().sum())(*args).sin().sum()
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_those_of_the_formula(name, attend):
    sizes = {"batch": 1, "heads_q": 2, "heads_kv": 1, "len_q": 2, "len_k": 3, "head_dim": 2}
    tensors = attention_inputs(head_dim_v=2, **sizes)
    options = {"softcap": 1.5, "causal": True, "alignment": "bottom_right"}

    def loss_of(function):
        return lambda *args: function(*args, **options).sin().sum()

    transform = TRANSFORMS[name]
    close(transform(loss_of(attend))(*tensors), transform(loss_of(formula))(*tensors))


@pytest.mark.parametrize("name", ["grad", "hessian", "jacrev of jacrev", "grad of grad"])
@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_transforms_of_softmax(kind, name):
    x = random_tensor(4, 3)
    ours, theirs = getattr(flashattn_ext, kind), getattr(torch, kind)
    other = random_tensor(4, 3, seed=9)

    def loss_of(function):
        return lambda x, y, z=None: (function(x * y, 0) * x).square().sum()

    def transformed(function):
        transform = TRANSFORMS[name] if name != "grad" else (lambda loss: grad(loss, (0, 1)))
        return transform(loss_of(function))(x, other)

    close(transformed(ours), transformed(theirs))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_softmax_dims(dim, at):
    x = random_tensor(3, 4, 5)
    got = vmap(lambda x: flashattn_ext.softmax(x, dim), at)(x)
    close(got, vmap(lambda x: torch.softmax(x, dim), at)(x))
    scalars = vmap(lambda x: flashattn_ext.log_softmax(x, 0))(x[:, 0, 0])
    close(scalars, torch.zeros(3, dtype=torch.float64))


def test_gradients_per_sample():
    """The usual use: one gradient for each entry of the batch."""
    weight = random_tensor(3, 3)
    query, key, value = mapped(*attention_inputs(head_dim_v=3))

    def loss(weight, query, key, value):
        return flashattn_ext.flash_attention(query @ weight, key, value).square().sum()

    assert_maps(grad(loss), (None, 0, 0, 0), weight, query, key, value)
