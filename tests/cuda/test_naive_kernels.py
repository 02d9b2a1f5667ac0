"""naive_attention on CUDA: streams, graphs, other devices, long rows, precision, memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from checks import check, naive_attention, random_upstream, run
from problems import Problem, build
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_ext

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Every step of the kernels; grouped heads that are not one matrix; copies for key lengths.
EVERYTHING = Problem(
    heads_q=4, len_q=40, len_k=70, causal=True, alignment="bottom_right", mask="float_rows",
    mask_shape="1hqk", key_lengths=(100, 60), softcap=5.0, alibi="batch", sinks="fp32",
    dropout_p=0.3, layout="blhd",
)  # fmt: skip
PROBLEMS = {"plain": Problem(len_k=64), "everything": EVERYTHING}
DTYPES = ("fp16", "bf16", "fp32", "fp64")


@pytest.fixture(params=[(name, dtype) for name in PROBLEMS for dtype in DTYPES], ids=str)
def problem(request):
    name, dtype = request.param
    return dataclasses.replace(PROBLEMS[name], dtype=dtype)


def both_ways(tensors, options):
    """Every result and gradient, as a flat list."""
    upstream = random_upstream(tensors, packed=False, weights=True)
    results, gradients = run(naive_attention, tensors, options, upstream)
    return [result.detach() for result in results] + list(gradients.values())


def assert_all_equal(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


def test_current_stream(problem):
    """Work goes to torch's current stream: results depend on what that stream did before."""
    tensors, options = build(problem, "cuda")
    want = both_ways(tensors, options)
    upstream = random_upstream(tensors, packed=False, weights=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = [torch.empty_like(tensor) for tensor in tensors]
        run(naive_attention, late, options, upstream)  # memory, and cuBLAS for this stream
        torch.cuda._sleep(50_000_000)
        for tensor, source in zip(late, tensors, strict=True):
            tensor.copy_(source)
        results, gradients = run(naive_attention, late, options, upstream)
    assert not stream.query(), "the op waited for the stream"
    stream.synchronize()
    assert_all_equal([*results, *gradients.values()], want)


def test_graph_capture(problem):
    """Forward and backward are captured; replays see new inputs and new dropout states."""
    tensors, options = build(problem, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both_ways(tensors, options)
    torch.cuda.current_stream().wait_stream(stream)
    upstream = random_upstream(tensors, packed=False, weights=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results, gradients = run(naive_attention, tensors, options, upstream)
        captured = [*results, *gradients.values()]
    for seed in range(2):
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
        if "rng_state" in options:
            options["rng_state"].fill_(seed)
        graph.replay()
        assert_all_equal(captured, both_ways(tensors, options))


def test_every_replay_draws_its_own_dropout():
    tensors, _ = build(Problem(len_k=64), "cuda")
    flashattn_ext.naive_attention(*tensors, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashattn_ext.naive_attention(*tensors, dropout_p=0.5)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(out.clone())
    assert not torch.equal(replays[0], replays[1]) and not torch.equal(replays[1], replays[2])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_that_is_not_current(problem):
    tensors, options = build(problem, "cuda:0")
    want = both_ways(tensors, options)
    moved = [tensor.to("cuda:1") for tensor in tensors]
    for (name, option), copy in zip(list(options.items()), options.values(), strict=True):
        if isinstance(copy, torch.Tensor):
            options[name] = option.to("cuda:1")
    with torch.cuda.device(0):
        got = both_ways(moved, options)
        assert torch.cuda.current_device() == 0
    assert all(result.device.index == 1 for result in got)
    assert_all_equal([result.to("cuda:0") for result in got], want)


@pytest.mark.parametrize("len_k", [256, 257, 513, 1024, 1025, 2048, 4097, 8192, 8200, 20_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_share_a_row(dtype, len_k):
    """Lanes of a warp, a warp, a block, and a block in turns."""
    for options in ({}, {"softcap": 5.0, "sinks": "fp32", "dropout_p": 0.2, "mask": "float_rows"}):
        problem = Problem(dtype=dtype, batch=1, len_q=5, len_k=len_k, head_dim=8, **options)
        check(naive_attention, problem, "cuda", weights=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_backward_of_probabilities_at_any_offset(dtype):
    """The raw op takes views of what forward returned: off by one element, and strided."""
    ops = torch.ops.flashattn_ext
    tensors, _ = build(Problem(dtype=dtype, len_k=64), "cuda")
    out, lse, _, _, probs = ops.naive_attention_forward(*tensors)
    grad_out, wanted = torch.randn_like(out), [True] * 3 + [False] * 3
    want = ops.naive_attention_backward(grad_out, None, None, *tensors, probs, lse, wanted)
    shifted = torch.empty(probs.numel() + 1, dtype=probs.dtype, device="cuda")[1:]
    strided = torch.empty(*probs.shape, 2, dtype=probs.dtype, device="cuda")[..., 0]
    for view in (shifted.view(probs.shape), strided):
        view.copy_(probs)
        got = ops.naive_attention_backward(grad_out, None, None, *tensors, view, lse, wanted)
        assert_all_equal(got, want)


def test_fp32_is_fp32_whatever_torch_is_told():
    """No TF32 and no 16-bit sums, though torch's own products may be allowed to use them."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for allowed in (False, True):
            matmul.allow_tf32 = allowed
            problem = Problem(len_q=256, len_k=256, head_dim=128, head_dim_v=128)
            results, gradients = check(naive_attention, problem, "cuda")
            tensors, options = build(problem, "cuda")
            doubles = [tensor.double() for tensor in tensors]
            upstream = random_upstream(tensors, packed=False)
            exact, exact_gradients = run(naive_attention, doubles, options, upstream)
            pairs = [(results.out, exact.out), (results.lse, exact.lse)]
            pairs += [(gradients[name], exact_gradients[name]) for name in gradients]
            for got, want in pairs:
                assert (got - want).abs().max() <= 1e-5 * want.abs().max()
            assert matmul.allow_tf32 == allowed
    finally:
        matmul.allow_tf32 = before


def peak(call):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_the_math_back_end(dtype, causal, dropout_p):
    leaves = [
        torch.randn(2, 8, 1024, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]
    grad = torch.randn_like(leaves[0])

    def ours():
        out = flashattn_ext.naive_attention(*leaves, causal=causal, dropout_p=dropout_p)
        return out, torch.autograd.grad(out, leaves, grad)

    def math():
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=causal, dropout_p=dropout_p
            )
            return out, torch.autograd.grad(out, leaves, grad)

    peak(ours), peak(math)  # the workspaces of cuBLAS
    assert peak(ours) <= 1.05 * peak(math)


def test_more_pairs_than_an_int_counts():
    """2^31 pairs and a few rows; the last ones are those of a call of their own."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs more memory")
    query = torch.randn(1, 1, 2**17 + 8, 16, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(1, 1, 2**14, 16, device="cuda", dtype=query.dtype) for _ in range(2))
    out = flashattn_ext.naive_attention(query, key, value)
    for rows in (slice(0, 8), slice(-8, None)):
        alone = flashattn_ext.naive_attention(query[:, :, rows], key, value)
        torch.testing.assert_close(out[:, :, rows], alone, rtol=0.02, atol=1e-3)


def test_more_batches_than_a_grid_has_z():
    tensors = [torch.randn(70_000, 2, 3, 8, device="cuda") for _ in range(3)]
    out = flashattn_ext.naive_attention(*tensors)
    exact = ((tensors[0] @ tensors[1].transpose(2, 3)) / 8**0.5).softmax(-1) @ tensors[2]
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
