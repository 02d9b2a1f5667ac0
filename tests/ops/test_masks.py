"""attn_mask, windows, causality and key lengths: who sees whom, on the fused and the naive path."""

from __future__ import annotations

import functools

import formula
import pytest
import torch
from checks import DENSE_OPS, check, check_call, flash_attention, random_upstream, run
from layouts import EXPANSIONS, LAYOUTS, lay_out
from problems import MASK_SHAPES, Problem, build
from tolerances import assert_close

import flashattn_ext

OPS = ("flash_attention_forward", "flash_attention_backward")
INFINITY = float("inf")
KINDS = ("bool", "float", "fp32", "bool_rows", "float_rows", "fp32_rows", "finfo_min_rows")


@pytest.fixture(params=DENSE_OPS)
def op(request):
    return DENSE_OPS[request.param]


def small(**options):
    return Problem(**{"batch": 2, "heads_q": 4, "head_dim": 8, "head_dim_v": 8, **options})


def columns_seen(window, len_q, len_k, device, **options):
    """Which keys each query attends to: with V the identity, out is the row of probabilities."""
    query = torch.zeros(1, 1, len_q, 4, device=device)
    key = torch.zeros(1, 1, len_k, 4, device=device)
    value = torch.eye(len_k, device=device)[None, None]
    out = flashattn_ext.flash_attention(query, key, value, window=window, **options)
    return (out[0, 0] > 0).cpu()


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_and_kind(kind, shape, op, device):  # M1, M2, M4, N1, L6
    for dtype in ("fp16", "fp32"):
        check(op, small(dtype=dtype, mask=kind, mask_shape=shape), device)


@pytest.mark.parametrize("kind", ["bool_rows", "float", "fp32"])
@pytest.mark.parametrize("flags", [
    {"causal": True, "alignment": "top_left"},
    {"window": (4, 2), "alignment": "bottom_right"},
    {"key_lengths": (50, 0)},
    {"causal": True, "alignment": "bottom_right", "key_lengths": (40, 100)},
], ids=lambda flags: "+".join(flags))  # fmt: skip
def test_mask_and_flags_intersect(flags, kind, op, device):  # M6, N7
    for dtype in ("bf16", "fp32"):
        check(op, small(dtype=dtype, mask=kind, **flags), device)


def test_a_mask_is_never_ignored(op, device):  # M1, M5
    problem = small(mask="bool", len_q=20, len_k=20)
    tensors, _options = build(problem, device)
    lower = torch.ones(20, 20, dtype=torch.bool, device=device).tril()
    runs = [
        run(op, tensors, {"attn_mask": mask})[0].out
        for mask in (torch.ones_like(lower), lower, lower.T, ~lower)
    ]
    runs.append(run(op, tensors, {})[0].out)
    assert torch.equal(runs[0], runs[4])  # all True is no mask
    for a, b in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3)):
        assert not torch.allclose(runs[a], runs[b])
    assert_close("causal", runs[1], run(op, tensors, {"causal": True})[0].out, None, torch.float32)


@pytest.mark.parametrize("len_q, len_k", [(2, 6), (5, 2), (7, 7), (194, 1), (257, 64)])
def test_alignment_of_the_diagonal(len_q, len_k, op, device):  # S3, S4
    for alignment, diagonal in (("top_left", 0), ("bottom_right", len_k - len_q)):
        tensors, _ = build(small(len_q=len_q, len_k=len_k), device)
        mask = torch.ones(len_q, len_k, dtype=torch.bool, device=device).tril(diagonal)
        by_flag = run(op, tensors, {"causal": True, "alignment": alignment})[0]
        by_mask = run(op, tensors, {"attn_mask": mask})[0]
        assert_close("out", by_flag.out, by_mask.out, None, torch.float32)
        blind = ~mask.any(1)
        assert not by_flag.out[:, :, blind].count_nonzero()
        assert (by_flag.lse[:, :, blind] == -INFINITY).all()
        check_call(op, tensors, {"causal": True, "alignment": alignment})


def test_first_rows_blind_at_bottom_right(device):  # S4: the first 193 rows are exactly 0
    check(
        flash_attention, small(len_q=258, len_k=65, causal=True, alignment="bottom_right"), device
    )
    tensors, _ = build(small(len_q=258, len_k=65, dtype="bf16"), device)
    out = flashattn_ext.flash_attention(*tensors, causal=True, alignment="bottom_right")
    assert not out[:, :, :193].count_nonzero() and out[:, :, 193:].count_nonzero()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(
    "window",
    [(0, 0), (0, 1), (1, 0), (3, 2), (None, 0), (0, None), (None, None), (63, 64), (10**9, 2**61)],
    ids=str,
)
def test_windows_are_inclusive(window, alignment, device):  # W3, W4, W5, W6
    for len_q, len_k in ((9, 9), (5, 70), (70, 5)):
        seen = columns_seen(window, len_q, len_k, device, alignment=alignment)
        expected, _ = formula.visible_pairs(len_q, len_k, window=window, alignment=alignment)
        assert torch.equal(seen, expected)
    if window == (3, 2):
        assert columns_seen(window, 40, 40, device)[20].sum() == 6


def test_the_diagonal_alone_gives_value(device):  # W5
    tensors, _ = build(small(len_q=70, len_k=70), device)
    out = flashattn_ext.flash_attention(
        *tensors[:2], tensors[2][:, :1].expand(2, 2, 70, 8), window=(0, 0)
    )
    assert torch.equal(out, tensors[2][:, :1].expand(2, 4, 70, 8))


def test_causal_as_a_window(device):  # W1
    tensors, _ = build(small(len_q=70, len_k=70, dtype="bf16"), device)
    causal = run(flash_attention, tensors, {"causal": True})[0]
    for window in ((None, 0), (69, 0), (10**6, 0)):
        assert torch.equal(run(flash_attention, tensors, {"window": window})[0].out, causal.out)
    both = run(flash_attention, tensors, {"causal": True, "window": (None, 30)})[0]
    assert torch.equal(both.out, causal.out)


@pytest.mark.parametrize("window", [(127, 0), (64, 64), (0, 256)], ids=str)
@pytest.mark.parametrize("length", [100, 200, 321])
def test_local_attention_off_the_tile_edges(length, window, device):  # W7
    problem = small(batch=1, heads_q=2, len_q=length, len_k=length, window=window, dtype="fp16")
    check(flash_attention, problem, device)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_rows_of_minus_infinity(dtype, op, device):  # N1, N3, N7
    tensors, _ = build(small(dtype=dtype), device)
    mask = torch.zeros(2, 1, 17, 33, dtype=tensors[0].dtype, device=device)
    mask[:, :, 3:9] = -INFINITY
    results, gradients = check_call(op, tensors, {"attn_mask": mask})
    assert not results.out[:, :, 3:9].count_nonzero()
    assert not gradients["query"][:, :, 3:9].count_nonzero()
    assert not gradients["attn_mask"][:, :, 3:9].count_nonzero()
    if results.weights is not None:
        assert not results.weights[:, :, 3:9].count_nonzero()
    as_bool, bool_gradients = check_call(op, tensors, {"attn_mask": mask == 0})
    assert torch.equal(as_bool.out, results.out)
    for name in ("query", "key", "value"):
        assert_close(name, gradients[name], bool_gradients[name].double(), None, tensors[0].dtype)


def test_blind_rows_add_nothing_to_keys(op, device):  # N1: dk, dv as without the row
    tensors, _ = build(small(heads_q=2, len_q=6), device)
    mask = torch.ones(6, 33, dtype=torch.bool, device=device)
    mask[2] = False
    upstream = [torch.randn(2, 2, 6, 8, device=device), torch.randn(2, 2, 6, device=device)]
    _, with_row = run(op, tensors, {"attn_mask": mask}, [*upstream])
    keep = [0, 1, 3, 4, 5]
    shorter = [tensors[0][:, :, keep], *tensors[1:]]
    _, without = run(op, shorter, {}, [upstream[0][:, :, keep], upstream[1][:, :, keep]])
    for name in ("key", "value"):
        assert_close(name, with_row[name], without[name].double(), None, torch.float32)


def test_same_forward_with_and_without_gradients(op, device):  # N2
    for mask in ("bool_rows", "float_rows"):
        tensors, options = build(small(mask=mask), device)
        plain = run(op, tensors, options)[0]
        with torch.no_grad():
            off = run(op, tensors, options)[0]
        with torch.inference_mode():
            inference = run(op, tensors, options)[0]
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        training = op(*leaves, **options)
        assert torch.equal(plain.out, training.out) and torch.equal(plain.out, off.out)
        assert torch.equal(plain.out, inference.out)


@pytest.mark.parametrize("first", [1, 15, 16, 17, 64, 65, 150])
def test_leading_keys_masked(first, op, device):  # N26, M9
    tensors, _ = build(small(len_k=170), device)
    mask = torch.ones(17, 170, dtype=torch.bool, device=device)
    mask[:, :first] = False
    check_call(op, tensors, {"attn_mask": mask})
    bias = torch.zeros(17, 170, device=device).masked_fill(~mask, -INFINITY)
    check_call(op, tensors, {"attn_mask": bias, "causal": True, "alignment": "bottom_right"})


def test_document_mask_of_blocks(op, device):  # M9: whole tiles of -inf
    tensors, _ = build(small(len_q=130, len_k=130, dtype="bf16"), device)
    document = torch.arange(130, device=device) // 27
    mask = torch.zeros(130, 130, device=device, dtype=torch.bfloat16)
    mask.masked_fill_(document[:, None] != document[None], -INFINITY)
    check_call(op, tensors, {"attn_mask": mask, "causal": True})


@pytest.mark.parametrize("length", [63, 65, 129])
def test_growing_bias_under_causality(length, op, device):  # N25
    tensors, _ = build(small(len_q=length, len_k=length), device)
    position = torch.arange(length, device=device, dtype=torch.float32)
    bias = (position[None] - position[:, None]) * 40.0
    check_call(op, tensors, {"attn_mask": bias, "causal": True})


@pytest.mark.parametrize("lengths", [(0, 0), (33, 0), (1, 32), (16, 17)], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_key_lengths(index, lengths, op, device):
    tensors, _ = build(small(), device)
    options = {"key_lengths": torch.tensor(lengths, dtype=index, device=device)}
    check_call(op, tensors, options)
    for alignment in ("top_left", "bottom_right"):
        check_call(op, tensors, {**options, "causal": True, "alignment": alignment})


def test_mask_views_are_read_in_place(op, device):  # L1, L6, L7, M2
    tensors, _ = build(small(), device)
    storage = torch.randn(2, 4, 40, 71, device=device)
    views = {
        "sliced": storage[:, :, 3:20, 5:38],
        "every second": storage[:, :, :34:2, 1:67:2],
        "transposed": torch.randn(2, 4, 33, 17, device=device).transpose(2, 3),
        "expanded": storage[:1, :1, :1, 2:35].expand(2, 4, 17, 33),
        "one row": storage[0, 0, 0, 1:34],
    }
    for view in views.values():
        check_call(op, tensors, {"attn_mask": view})
        check_call(op, tensors, {"attn_mask": view > 0})


def without_max_logits(query, key, value, **options):
    out, lse = flashattn_ext.flash_attention(query, key, value, return_lse=True, **options)
    return formula.Results(out, lse, None, None)


def whole_chunks(**options):
    """A problem whose mask's rows are whole 16-byte chunks, longer than a tile each way.

    CUDA has kernels of their own for such a mask, where it is the only term and nobody asks for the
    largest logits.
    """
    return small(**{"dtype": "bf16", "len_q": 150, "len_k": 208, **options})


@pytest.mark.parametrize("head_dim", [40, 128, 200])
@pytest.mark.parametrize("kind", ["bool", "float", "bool_rows", "float_rows", "finfo_min_rows"])
@pytest.mark.parametrize("flags", [
    {},
    {"causal": True, "alignment": "bottom_right"},
    {"key_lengths": (96, 16)},
], ids=lambda flags: "+".join(flags) or "none")  # fmt: skip
def test_masks_of_whole_chunks(flags, kind, head_dim, device):  # M1, M2, N1, N4
    dtype = "fp16" if head_dim == 40 else "bf16"
    for shape in ("bhqk", "1hqk", "11qk", "b11k"):
        problem = whole_chunks(
            dtype=dtype,
            mask=kind,
            mask_shape=shape,
            head_dim=head_dim,
            head_dim_v=head_dim,
            **flags,
        )
        tensors, options = build(problem, device)
        results, _ = check_call(without_max_logits, tensors, options)
        if device == "cuda":  # the same bits from the kernels that take every option
            again = run(flash_attention, tensors, options)[0]
            assert torch.equal(results.out, again.out) and torch.equal(results.lse, again.lse)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_tiles(head_dim, dtype, deterministic, device):  # documents, and rows without keys
    problem = small(dtype=dtype, heads_q=2, len_q=350, len_k=416, head_dim=head_dim)
    tensors, _ = build(problem, device)
    document = torch.tensor([0] * 130 + [1] * 64 + [2] * 140 + [3] * 82, device=device)
    mask = document[:350, None] == document[None]
    mask[192:300] = False
    op = functools.partial(without_max_logits, deterministic=deterministic)
    terms = torch.zeros(350, 416, device=device).masked_fill(~mask, -INFINITY)
    for attn_mask in (mask, terms.to(tensors[0].dtype), terms):
        results, _ = check_call(op, tensors, {"attn_mask": attn_mask})
        assert not results.out[:, :, 192:300].count_nonzero()


@pytest.mark.parametrize("layout", LAYOUTS[1:] + EXPANSIONS)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_layouts_of_whole_chunks(kind, layout, device):  # the same bits, aligned or not
    tensors, options = build(whole_chunks(mask=kind, head_dim=64), device)
    mask = lay_out(options["attn_mask"], layout)
    upstream = random_upstream(tensors, packed=False)
    op = functools.partial(without_max_logits, deterministic=True)
    (got, gradients), (expected, plain) = (
        run(op, tensors, {"attn_mask": m}, upstream) for m in (mask, mask.contiguous())
    )
    assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name
