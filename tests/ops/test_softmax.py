"""softmax and log_softmax against the fp64 formula and against torch's own results."""

from __future__ import annotations

import pytest
import torch
from layouts import expanded, offset_by_one, permuted, sliced, strided
from tolerances import assert_close, finite, max_error

import flashattn_ext

OPS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
OURS = {"softmax": flashattn_ext.softmax, "log_softmax": flashattn_ext.log_softmax}
TORCH = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Around what a lane, a warp, a block, a cluster and their chunks hold.
SHORT = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
MIDDLE = (511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 16384, 16391)
LONG = (8192, 8200, 32768, 32772, 50257, 65535, 65536, 65537, 131072, 131080, 262144, 262147)
HUGE = (1_000_003, 2_097_152, 8_388_608)


@pytest.fixture(params=OURS)
def name(request):
    return request.param


def normal(shape, dtype, device, seed=0, scale=2.0):
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return values.to(dtype).to(device)


def differentiate(function, tensor, dim, grad, **options):
    """[result, gradient], or [result] where there is none."""
    if not tensor.is_floating_point():
        return [function(tensor, dim, **options)]
    tensor = tensor.detach().requires_grad_()
    result = function(tensor, dim, **options)
    return [result, *torch.autograd.grad(result, tensor, grad.to(result.dtype))]


def check(name, tensor, dim, grad, **options):
    """Forward and backward of one call, held against the one tolerance table."""
    target = options.get("dtype", tensor.dtype)

    def exact_and_eager(inputs):
        exact = differentiate(TORCH[name], inputs.to(target).double(), dim, grad)
        return exact, differentiate(TORCH[name], inputs, dim, grad, **options)

    def hold(what, index, dtype):
        def several_draws():
            """The error of torch on few numbers may be small by luck: the largest of ten draws."""
            draws = [
                exact_and_eager(normal(tensor.shape, tensor.dtype, tensor.device, seed + 2))
                for seed in range(10)
            ]
            return (
                max(max_error(eager[index], exact[index]) for exact, eager in draws),
                finite(exact[index]).abs().max().item(),
            )

        assert got[index].is_contiguous(), what
        assert_close(
            f"{what} of {name}", got[index], exact[index], eager[index], dtype, several_draws
        )

    got = differentiate(OURS[name], tensor, dim, grad, **options)
    exact, eager = exact_and_eager(tensor)
    assert got[0].dtype == target
    hold("result", 0, target)
    if len(got) > 1:
        assert got[1].dtype == tensor.dtype
        hold("gradient", 1, max(tensor.dtype, target, key=lambda dtype: torch.finfo(dtype).eps))


def check_rows(name, length, dtype, device, rows=5):
    check(
        name,
        normal((rows, length), dtype, device),
        -1,
        normal((rows, length), dtype, device, seed=1),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", SHORT + MIDDLE)
def test_lengths(name, length, dtype, device):
    check_rows(name, length, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LONG)
def test_long_rows(name, length, dtype, device):
    if device == "cpu" and length not in (50257, 65537):
        pytest.skip("no boundary of the CPU kernels")
    check_rows(name, length, dtype, device, rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("length", HUGE)
def test_huge_rows(name, length, dtype, device):
    if device == "cpu" and length > 1_000_003:
        pytest.skip("no boundary of the CPU kernels")
    check_rows(name, length, dtype, device, rows=2)


@pytest.mark.parametrize("rows", (1, 2, 31, 127, 128, 129, 1000))
@pytest.mark.parametrize("length", (5, 48, 200, 700))
def test_row_counts(name, rows, length, device):
    check_rows(name, length, torch.float32, device, rows)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(
    ("rows", "length"),
    ((400, 8192), (300, 16384), (200, 20_001), (150, 65536), (60, 50_257), (20, 262_144)),
)
def test_many_large_rows(name, rows, length, dtype, device):
    """Enough rows to fill a GPU, so that none is spread over idle parts of it."""
    if device == "cpu":
        pytest.skip("no boundary of the CPU kernels")
    check_rows(name, length, dtype, device, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", (2, 3, 8, 33, 64, 260))
@pytest.mark.parametrize("length", (1, 5, 64, 300))
def test_columns(name, length, inner, dtype, device):
    shape = (3, length, inner)
    check(name, normal(shape, dtype, device), 1, normal(shape, dtype, device, seed=1))


@pytest.mark.parametrize("length", (2048, 5000))
def test_long_columns(name, length, device):
    shape = (length, 24)
    check(name, normal(shape, torch.float32, device), 0, normal(shape, torch.float32, device, 1))


@pytest.mark.parametrize("dim", (0, 1, 2, 3, 4, -1, -2, -3, -4, -5))
def test_dims(name, dim, device):
    shape = (2, 3, 1, 5, 4)
    check(name, normal(shape, torch.float32, device), dim, normal(shape, torch.float32, device, 1))


VIEWS = {
    "sliced": sliced,
    "strided": strided,
    "offset_by_one": offset_by_one,
    "reversed_order": lambda tensor: permuted(tensor, tuple(reversed(range(tensor.dim())))),
    "swapped": lambda tensor: permuted(tensor, (1, 0, 2)),
    "row_of_each": lambda tensor: expanded(tensor, 0),
    "same_in_row": lambda tensor: expanded(tensor, tensor.dim() - 1),
    "one_value": lambda tensor: tensor[:1, :1, :1].expand(tensor.shape),
}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("dim", (0, 1, 2))
@pytest.mark.parametrize("view", VIEWS)
def test_views(name, view, dim, dtype, device):
    for shape in ((6, 8, 40), (3, 5, 515)):
        tensor = normal(shape, dtype, device)
        grad = normal(shape, dtype, device, seed=1)
        check(name, VIEWS[view](tensor), dim, grad)
        check(name, tensor, dim, VIEWS[view](grad))
        check(name, VIEWS[view](tensor), dim, VIEWS[view](grad))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_rows_that_begin_anywhere(name, dtype, device):
    """Rows apart and rows in line, at every distance from a multiple of 16 bytes."""
    layouts = [(37, 3001), (3001, 3001), (3001, 3008)]
    if device == "cuda":  # held by a block and by a cluster
        layouts += [(9001, 9001), (9001, 9009), (40_003, 40_003)]
    for length, stride in layouts:
        storage = normal(4 * stride + 16, dtype, device)
        gradients = normal(4 * stride + 16, dtype, device, seed=1)
        for offset in range(9):
            view = storage.as_strided((4, length), (stride, 1), offset)
            check(name, view, 1, gradients.as_strided((4, length), (stride, 1), (offset * 5) % 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", (3001, 9001, 50257))
@pytest.mark.parametrize("rows", (1, 9))
def test_rows_in_line_of_odd_length(name, rows, length, dtype, device):
    """Operands and results that lie alike, at every distance from a multiple of 16 bytes."""
    tensor = normal((rows, length), dtype, device)
    check(name, tensor, 1, normal((rows, length), dtype, device, seed=1))


def test_many_outer_dimensions(name, device):
    """More than the kernels count: read through a copy."""
    shape = (2, 3, 2, 3, 2, 3, 10)
    tensor = permuted(normal(shape, torch.float32, device), (5, 3, 1, 4, 2, 0, 6))
    check(name, tensor, -1, normal(shape, torch.float32, device, seed=1))


INFINITY, NAN = float("inf"), float("nan")
ROWS = {
    "all_hidden": [-INFINITY] * 5,
    "one_visible": [-INFINITY, -INFINITY, 3.0, -INFINITY, -INFINITY],
    "first_hidden": [-INFINITY, 1.0, 2.0, 3.0, 4.0],
    "positive_infinity": [1.0, INFINITY, 2.0, -INFINITY, 0.0],
    "two_infinities": [INFINITY, INFINITY, 2.0, 1.0, 0.0],
    "nan": [1.0, NAN, 2.0, 3.0, 4.0],
    "nan_among_hidden": [-INFINITY, NAN, -INFINITY, -INFINITY, -INFINITY],
    "far_apart": [-30000.0, 0.0, 30000.0, 29999.0, -1.0],
    "equal": [7.0] * 5,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", ROWS)
def test_special_rows(name, row, dtype, device):
    """NaN, infinities and zeros are where torch has them, at every length and in every kernel."""
    for repeat in (1, 30, 1700) if device == "cpu" else (1, 30, 200, 1700, 14000, 60000):
        values = torch.tensor(ROWS[row], dtype=dtype, device=device).repeat(repeat)
        plain = normal(len(values), dtype, device)
        for tensor, dim in (
            (torch.stack([values, plain]), 1),
            (torch.stack([values, plain], 1), 0),
        ):
            check(name, tensor, dim, torch.ones_like(tensor))


@pytest.mark.parametrize("size", (100.0, 3000.0, 2.0**16, 2.0**24, 2.0**25, 1e9, 3.3e38))
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_size(name, size, dtype, device):
    """Large numbers, equal and next to each other, at every length and in every kernel."""
    size = min(size, torch.finfo(dtype).max)
    row = torch.tensor([1.0, 1 - torch.finfo(dtype).eps, 0.99, 0.5, 0.0, 1.0], dtype=torch.float64)
    for repeat in (1, 30, 1700) if device == "cpu" else (1, 30, 200, 1700, 14000, 60000):
        values = (row * size).to(dtype).to(device).repeat(repeat)
        plain = normal(len(values), dtype, device)
        for tensor, dim in (
            (torch.stack([values, -values, plain]), 1),
            (torch.stack([values, -values, plain, plain], 1), 0),
        ):
            check(name, tensor, dim, torch.ones_like(tensor))


def test_large_values_keep_their_differences(device):
    """log_softmax of numbers near -1e7 is as exact as of their differences."""
    for length in (5, 500, 5000, 150000):
        small = torch.arange(length, device=device, dtype=torch.float32) % 16
        got = flashattn_ext.log_softmax(small - 1e7, -1)
        want = torch.log_softmax(small.double(), -1)
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=2e-7)
        exact = torch.softmax(small.double(), -1).float()
        torch.testing.assert_close(flashattn_ext.softmax(small + 1e7, -1), exact)


@pytest.mark.parametrize("length", (40, 3000))
def test_small_probabilities(length, device):
    """fp32 is exact to a few roundings down to the smallest normal number."""
    tensor = -torch.linspace(0, 87, length, device=device)
    got = flashattn_ext.softmax(tensor, -1).double()
    want = torch.softmax(tensor.double(), -1)
    torch.testing.assert_close(got, want, rtol=3e-6, atol=1e-38)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", (*DTYPES, torch.int64, torch.int8, torch.bool))
def test_dtype(name, source, target, device):
    for shape, dim in (((4, 70), 1), ((3, 1100), 1), ((5, 30, 8), 1)):
        tensor = normal(shape, torch.float64, device).to(source)
        check(name, tensor, dim, normal(shape, target, device, seed=1), dtype=target)


@pytest.mark.parametrize("shape", ((0,), (0, 4), (4, 0), (2, 0, 3), (0, 0)))
def test_empty(name, shape, device):
    tensor = torch.empty(shape, device=device, requires_grad=True)
    for dim in range(-len(shape), len(shape)):
        result = OURS[name](tensor, dim)
        assert result.shape == tensor.shape
        (gradient,) = torch.autograd.grad(result.sum(), tensor)
        assert gradient.shape == tensor.shape


@pytest.mark.parametrize("dim", (0, -1))
def test_scalar(name, dim, device):
    for value in (3.0, -INFINITY, NAN):
        tensor = torch.tensor(value, device=device)
        want = TORCH[name](tensor, dim)
        torch.testing.assert_close(OURS[name](tensor, dim), want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ("rows", "columns"))
def test_gradcheck(name, layout, device):
    shape, dim = ((3, 7), 1) if layout == "rows" else ((2, 5, 3), 1)
    tensor = normal(shape, torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: OURS[name](x, dim), (tensor,))


def test_same_bits_every_time(name, device):
    for shape, dim in (((50, 33), 1), ((7, 5000), 1), ((2, 1_500_000), 1), ((70, 40), 0)):
        tensor = normal(shape, torch.float32, device)
        first = OURS[name](tensor, dim)
        assert all(torch.equal(OURS[name](tensor, dim), first) for _ in range(3))


def test_threads_do_not_change_the_bits(name):
    tensor = normal((300, 700), torch.float32, "cpu")
    single = OURS[name](tensor, 1), OURS[name](tensor, 0)
    torch.set_num_threads(3)
    try:
        several = OURS[name](tensor, 1), OURS[name](tensor, 0)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(single[0], several[0])
    assert torch.equal(single[1], several[1])


@pytest.mark.parametrize("op", ("softmax", "log_softmax"))
def test_argument_errors(op, device):
    forward = getattr(torch.ops.flashattn_ext, op).default
    backward = getattr(torch.ops.flashattn_ext, f"{op}_backward").default
    tensor = torch.ones(2, 3, device=device)
    with pytest.raises(RuntimeError, match=r"input: expected dtype .* got Long"):
        forward(tensor.long(), 0)
    with pytest.raises(RuntimeError, match=r"dtype: expected dtype .* got Int"):
        forward(tensor, 0, dtype=torch.int32)
    for dim in (2, -3):
        with pytest.raises((RuntimeError, IndexError), match="dim: expected"):
            forward(tensor, dim)
    with pytest.raises(RuntimeError, match=r"grad_output: expected the dtype of output, Float"):
        backward(tensor.double(), tensor, 0, torch.float32)
    with pytest.raises(RuntimeError, match=r"grad_output: expected the shape of output, \(2, 3\)"):
        backward(tensor[:, :2], tensor, 0, torch.float32)
    with pytest.raises(RuntimeError, match=r"input_dtype: expected dtype .* got Long"):
        backward(tensor, tensor, 0, torch.int64)
