"""What every CUDA op must survive: streams, graphs, other devices, huge tensors."""

from __future__ import annotations

import pytest
import torch

import flashattn_ext

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# One for each kernel: warp, block, held in registers and in shared memory, online, columns.
PROBLEMS = (
    ((1000, 24), 1),
    ((1000, 25), 1),
    ((300, 1000), 1),
    ((200, 16384), 1),
    ((6, 65536), 1),
    ((6, 50257), 1),
    ((2, 3_000_000), 1),
    ((2, 3_000_001), 1),
    ((5, 100, 64), 1),
    ((5, 100, 3), 1),
)


def run_all(tensor, dim):
    """Every softmax op on one tensor."""
    ops = torch.ops.flashattn_ext
    output, log_output = ops.softmax.default(tensor, dim), ops.log_softmax.default(tensor, dim)
    return (
        output,
        log_output,
        ops.softmax_backward.default(tensor, output, dim, tensor.dtype),
        ops.log_softmax_backward.default(tensor, log_output, dim, tensor.dtype),
    )


def assert_all_equal(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("shape", "dim"), PROBLEMS)
def test_current_stream(shape, dim):
    """Work goes to torch's current stream: results depend on what that stream did before."""
    tensor = torch.randn(shape, device="cuda")
    want = run_all(tensor, dim)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.empty_like(tensor)
        torch.cuda._sleep(20_000_000)
        late.copy_(tensor)
        got = run_all(late, dim)
    assert not stream.query(), "the op waited for the stream"
    stream.synchronize()
    assert_all_equal(got, want)


@pytest.mark.parametrize(("shape", "dim"), PROBLEMS)
def test_graph_capture(shape, dim):
    tensor = torch.randn(shape, device="cuda")
    run_all(tensor, dim)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all(tensor, dim)
    for seed in range(2):
        torch.manual_seed(seed)
        tensor.copy_(torch.randn(shape, device="cuda"))
        graph.replay()
        assert_all_equal(captured, run_all(tensor, dim))


def test_dropout_mask_in_a_graph():
    state = torch.tensor([1, 2], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashattn_ext.dropout_mask(state, 2, 3, 40, 50, 0.4)
    for value in (5, 2**40):
        state.copy_(torch.tensor([value, 7]))
        graph.replay()
        want = flashattn_ext.dropout_mask(state.cpu(), 2, 3, 40, 50, 0.4)
        assert torch.equal(captured.cpu(), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("shape", "dim"), PROBLEMS)
def test_device_that_is_not_current(shape, dim):
    tensor = torch.randn(shape, device="cuda:0")
    want = run_all(tensor, dim)
    with torch.cuda.device(0):
        got = run_all(tensor.to("cuda:1"), dim)
        assert torch.cuda.current_device() == 0
    assert all(result.device.index == 1 for result in got)
    assert_all_equal([result.to("cuda:0") for result in got], want)


@pytest.mark.parametrize("shape", ((2**31 + 2**20, 4), (2, 2**31 + 11), (3, 2**30 + 1, 2)))
def test_more_elements_than_an_int_counts(shape):
    """Checked at both ends, where an offset of 32 bits would have wrapped."""
    needed = 3 * 2 * torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 1.5 * needed:
        pytest.skip("needs more memory")
    tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    output = torch.ops.flashattn_ext.softmax.default(tensor, 1)
    for row in (0, shape[0] - 1):
        parts = [part.float().logsumexp(0) for part in tensor[row].split(2**24)]
        log_sum = torch.stack(parts).logsumexp(0)
        for part, result in zip(tensor[row].split(2**24), output[row].split(2**24), strict=True):
            torch.testing.assert_close(
                result.float(), (part.float() - log_sum).exp(), rtol=0.01, atol=1e-12
            )
    del output
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", (70_000, 2**21))
def test_more_rows_than_a_grid_has_y(rows):
    tensor = torch.randn(rows, 600, device="cuda", dtype=torch.bfloat16)
    output = torch.ops.flashattn_ext.softmax.default(tensor, 1)
    torch.testing.assert_close(output, torch.softmax(tensor, 1), rtol=0.01, atol=1e-6)
