"""The drop-in: torch's results wherever torch is right, and ours where it is not."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as functional
from calls import random_tensor
from sdpa_calls import calls_of, tensors, torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flashattn_ext
from flashattn_ext import scaled_dot_product_attention, use_as_sdpa


@pytest.fixture(autouse=True)
def torchs_own_again():
    yield
    assert functional.scaled_dot_product_attention is torch_attention


def assert_same(query, key, value, attn_mask=None, **options):
    """Results and gradients are torch's."""
    inputs = [query, key, value]
    if attn_mask is not None and attn_mask.is_floating_point():
        inputs.append(attn_mask.requires_grad_())
    ours = scaled_dot_product_attention(query, key, value, attn_mask, **options)
    theirs = torch_attention(query, key, value, attn_mask, **options)
    torch.testing.assert_close(ours, theirs)
    upstream = random_tensor(*ours.shape, seed=7)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream)
    )


# --- Shapes ---------------------------------------------------------------------------------------

SHAPES = {
    "2-D": ((5, 8), (7, 8), (7, 6)),
    "3-D": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "4-D": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "5-D": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 9)),
    "6-D": ((2, 3, 1, 4, 5, 8), (2, 3, 4, 4, 7, 8), (1, 3, 4, 4, 7, 9)),
    "fewer dimensions in key": ((2, 4, 5, 8), (4, 7, 8), (4, 7, 8)),
    "fewer dimensions in query": ((4, 5, 8), (2, 4, 7, 8), (7, 8)),
    "one key head": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one key head, all value heads": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 4, 7, 8)),
    "one query head": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "one query batch": ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "other head_dim_v": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 20)),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8)),
    "no queries": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "no batch": ((0, 4, 5, 8), (0, 4, 7, 8), (0, 4, 7, 8)),
    "no head_dim": ((2, 4, 5, 0), (2, 4, 7, 0), (2, 4, 7, 6)),
    "no head_dim_v": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 0)),
    "head_dim 600": ((1, 1, 5, 600), (1, 1, 7, 600), (1, 1, 7, 600)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, is_causal):
    assert_same(*tensors(*SHAPES[shape]), is_causal=is_causal)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
        ((2, 8, 5, 8), (2, 2, 7, 8), (2, 4, 7, 8)),
        ((4, 5, 8), (2, 7, 8), (2, 7, 8)),
        ((3, 2, 4, 5, 8), (3, 2, 2, 7, 8), (3, 2, 2, 7, 8)),
    ],
    ids=str,
)
def test_grouped_heads(shapes):  # G1
    assert_same(*tensors(*shapes), enable_gqa=True)


def test_grouped_heads_must_be_asked_for():
    query, key, value = tensors((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    with pytest.raises(ValueError, match="flashattn_ext: query: expected as many heads as key"):
        scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_no_heads(dims):  # S1: kills the process in torch
    query = torch.empty(*(2, 0, 5, 8)[4 - dims :], requires_grad=True)
    out = scaled_dot_product_attention(query, query, query)
    assert out.shape == query.shape
    out.sum().backward()


def test_keys_and_values_of_different_length_are_an_error():
    query, key, value = tensors((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 6, 8))
    with pytest.raises(RuntimeError, match="flashattn_ext: value: expected length 7 as in key"):
        scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 2.0])
def test_scale(scale):
    assert_same(*tensors(*SHAPES["4-D"]), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes(dtype):
    query, key, value = tensors(*SHAPES["4-D"], dtype=dtype)
    exact = torch_attention(query.double(), key.double(), value.double())
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value), exact.to(dtype))


# --- Masks ----------------------------------------------------------------------------------------

MASK_SHAPES = [(5, 7), (1, 7), (5, 1), (1, 1), (2, 1, 1, 7), (2, 4, 5, 7), (4, 1, 1), (4, 5, 7)]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks(shape, kind):  # M1, M4, M5
    mask = random_tensor(*shape)
    assert_same(*tensors(*SHAPES["4-D"]), mask > -0.5 if kind == "bool" else mask)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 1, 5, 7), (3, 1, 1, 7), (2, 1, 4, 5, 7)], ids=str)
def test_masks_of_5_dimensions(shape):
    query, key, value = tensors(*SHAPES["5-D"])
    assert_same(query, key, value, random_tensor(*shape))
    assert_same(query, key, value, random_tensor(*shape) > -0.5, is_causal=False)


@pytest.mark.parametrize("shape", [(7,), (1,), ()], ids=str)
def test_masks_of_one_dimension(shape):  # torch on the CPU: IndexError
    query, key, value = tensors(*SHAPES["4-D"])
    mask, wide = (random_tensor(*shape).requires_grad_() for _ in range(2))
    ours = scaled_dot_product_attention(query, key, value, mask)
    theirs = torch_attention(query, key, value, wide.expand(1, 1, 5, 7))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), mask), torch.autograd.grad(theirs.sum(), wide)
    )


def test_masks_of_3_and_2_dimensional_inputs():
    assert_same(*tensors((3, 5, 8), (3, 7, 8), (3, 7, 8)), random_tensor(3, 5, 7))
    assert_same(*tensors((5, 8), (7, 8), (7, 8)), random_tensor(5, 7))


def test_mask_and_is_causal_intersect():  # M6
    query, key, value = tensors(*SHAPES["4-D"])
    mask = random_tensor(5, 7)
    causal = torch.ones(5, 7, dtype=torch.bool).tril()
    ours = scaled_dot_product_attention(query, key, value, mask, is_causal=True)
    both = mask.masked_fill(~causal, -torch.inf)
    torch.testing.assert_close(ours, torch_attention(query, key, value, both))
    ours = scaled_dot_product_attention(query, key, value, mask > 0, is_causal=True)
    twin = scaled_dot_product_attention(query, key, value, (mask > 0) & causal)
    torch.testing.assert_close(ours, twin)


@pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min"])
def test_rows_that_see_nothing(kind):  # N1, N2, N4
    query, key, value = tensors(*SHAPES["4-D"], dtype=torch.float32)
    hidden = torch.zeros(5, 7, dtype=torch.bool)
    hidden[2] = True
    lowest = torch.finfo(torch.float32).min if kind == "finfo.min" else -torch.inf
    mask = ~hidden if kind == "bool" else torch.zeros(5, 7).masked_fill(hidden, lowest)
    out = scaled_dot_product_attention(query, key, value, mask)
    if kind == "finfo.min":  # an ordinary number: all keys alike
        torch.testing.assert_close(out[:, :, 2], value.mean(2))
    else:
        assert out[:, :, 2].count_nonzero() == 0
    out.sum().backward()
    assert torch.isfinite(query.grad).all()
    if kind != "finfo.min":
        assert query.grad[:, :, 2].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_mask_with_16_bit_inputs(dtype):
    query, key, value = tensors(*SHAPES["4-D"], dtype=dtype)
    mask = random_tensor(5, 7, dtype=torch.float32)
    exact = torch_attention(query.double(), key.double(), value.double(), mask.double())
    torch.testing.assert_close(
        scaled_dot_product_attention(query, key, value, mask), exact.to(dtype)
    )


@pytest.mark.parametrize("bias", [causal_upper_left(5, 7), causal_lower_right(5, 7)], ids=repr)
@pytest.mark.parametrize("installed", [False, True])
def test_causal_bias(installed, bias):  # S3
    query, key, value = tensors(*SHAPES["4-D"])
    expected = torch_attention(query, key, value, bias._materialize())
    torch.testing.assert_close(scaled_dot_product_attention(query, key, value, bias), expected)
    if installed:
        with use_as_sdpa():
            out = functional.scaled_dot_product_attention(query, key, value, bias)
            assert calls_of(functional.scaled_dot_product_attention, query, key, value, bias) == [
                "flashattn_ext.flash_attention_forward.default"
            ]
            torch.testing.assert_close(out, expected)
            # What is left to torch keeps its meaning too.
            with sdpa_kernel(SDPBackend.MATH):
                out = functional.scaled_dot_product_attention(query, key, value, bias)
        torch.testing.assert_close(out, expected)


def test_causal_bias_errors():
    query, key, value = tensors(*SHAPES["4-D"])
    with pytest.raises(ValueError, match="is_causal"):
        scaled_dot_product_attention(query, key, value, causal_upper_left(5, 7), is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask: .* \(5, 7\), but got \(4, 6\)"):
        scaled_dot_product_attention(query, key, value, causal_lower_right(4, 6))


# --- Dropout, autocast, derivatives ---------------------------------------------------------------


def test_dropout():  # R9
    query, key, value = tensors(*SHAPES["4-D"])
    torch.manual_seed(1)
    state = flashattn_ext.reserve_rng("cpu")
    torch.manual_seed(1)
    out = scaled_dot_product_attention(query, key, value, dropout_p=0.4)
    torch.testing.assert_close(
        out, flashattn_ext.flash_attention(query, key, value, dropout_p=0.4, rng_state=state)
    )
    assert scaled_dot_product_attention(query, key, value, dropout_p=1.0).count_nonzero() == 0
    with pytest.raises(ValueError, match="dropout_p"):
        scaled_dot_product_attention(query, key, value, dropout_p=1.5)


@pytest.mark.parametrize("shape", ["2-D", "4-D", "5-D", "one query head", "no head_dim"])
def test_gradgradcheck(shape):
    assert torch.autograd.gradgradcheck(
        scaled_dot_product_attention, tensors(*SHAPES[shape]), fast_mode=True
    )


@pytest.mark.parametrize("shape", ["3-D", "4-D", "5-D"])
def test_torch_func(shape):
    inputs = [tensor.detach() for tensor in tensors(*SHAPES[shape])]

    def loss(function):
        return lambda *args: function(*args, is_causal=True).square().sum()

    for transform in (
        lambda f: torch.func.grad(f, (0, 1, 2))(*inputs),
        lambda f: torch.func.vmap(torch.func.grad(f))(*[torch.stack([x, -x]) for x in inputs]),
        lambda f: torch.func.jvp(f, tuple(inputs), tuple(inputs)),
    ):
        torch.testing.assert_close(
            transform(loss(scaled_dot_product_attention)), transform(loss(_unfused))
        )


def _unfused(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return torch_attention(*args, **kwargs)


def test_autocast():
    query, key, value = tensors(*SHAPES["4-D"], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(query, key.bfloat16(), value)
        assert out.dtype == torch_attention(query, key.bfloat16(), value).dtype == torch.bfloat16


# --- What goes to torch ---------------------------------------------------------------------------


def test_nested_tensors():
    parts = [torch.randn(n, 4, 8) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    for context in (use_as_sdpa(), warnings.catch_warnings()):
        with context:
            out = scaled_dot_product_attention(jagged, jagged, jagged)
        torch.testing.assert_close(out.values(), torch_attention(jagged, jagged, jagged).values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([part.transpose(0, 1) for part in parts])
        assert scaled_dot_product_attention(strided, strided, strided).is_nested


def test_inputs_that_torch_refuses_are_refused():
    for dtype in (torch.int64, torch.complex64):
        x = torch.ones(1, 1, 2, 3, dtype=dtype)
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(x, x, x)
    vector = torch.ones(3)
    with pytest.raises(RuntimeError, match="at least 2 dim"):
        scaled_dot_product_attention(vector, vector, vector)


class Named(torch.Tensor):
    """A subclass without rules of its own."""


class Knows(torch.Tensor):
    """A subclass that has its own attention, and finds it by what torch's function is."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            return "its own"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_keep_their_rules():
    x = random_tensor(1, 2, 3, 4)
    named, knows = x.as_subclass(Named), x.as_subclass(Knows)
    out = scaled_dot_product_attention(named, x, x)
    assert type(out) is Named
    torch.testing.assert_close(out.as_subclass(torch.Tensor), torch_attention(x, x, x))
    assert scaled_dot_product_attention(x, x, x, knows) == "its own"
    with use_as_sdpa():
        assert functional.scaled_dot_product_attention(knows, x, x) == "its own"


def test_function_modes_see_the_call():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        scaled_dot_product_attention(*tensors(*SHAPES["4-D"]))
    assert scaled_dot_product_attention in seen


def test_sdpa_kernel_is_honoured():
    query, key, value = tensors(*SHAPES["4-D"])
    with sdpa_kernel(SDPBackend.MATH):
        assert calls_of(scaled_dot_product_attention, query, key, value) == []
    assert calls_of(scaled_dot_product_attention, query, key, value) != []


def test_meta_tensors():
    query, key, value = (x.to("meta") for x in tensors(*SHAPES["4-D"]))
    assert scaled_dot_product_attention(query, key, value).shape == (2, 4, 5, 8)
