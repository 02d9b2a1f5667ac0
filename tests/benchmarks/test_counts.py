"""Operations are those of visible pairs, counted one by one here."""

import pytest
import torch

from benchmarks.attention import Attention, make_tensors
from benchmarks.counts import attention_bytes, attention_flops, visible_pairs
from flashattn_ext import _flops

CASES = {
    "full": {},
    "causal": {"causal": True},
    "wide": {"len_q": 5, "len_k": 11, "causal": True},
    "tall": {"len_q": 11, "len_k": 5, "causal": True},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window past the end": {"window": 50},
    "tall window": {"len_q": 13, "len_k": 4, "window": 3},
    "key lengths": {"key_lengths": (4, 9)},
    "causal key lengths": {"key_lengths": (4, 9), "causal": True},
    "window key lengths": {"key_lengths": (4, 9), "window": 3},
    "packed": {"lengths": (1, 6, 2)},
    "packed causal": {"lengths": (1, 6, 2), "causal": True},
    "packed window": {"lengths": (1, 6, 2), "window": 4},
    "bool mask": {"mask": "random bool"},
    "documents": {"mask": "document bool"},
    "float mask": {"mask": "float"},
}


def make_case(direction="forward", op="flash_attention", **options):
    batch = 1 if "lengths" in options else 2
    sizes = {"len_q": 9, "len_k": 9} | options
    return Attention(
        "test", direction, "fp32", batch, heads_q=4, heads_kv=2, head_dim=8, op=op, **sizes
    )


def counted(case, mask):
    """Every pair of every sequence, by the definition."""

    def seen(sequence, row, col):
        return (
            (not (case.causal or case.window) or col <= row)
            and (not case.window or col > row - case.window)
            and (not case.key_lengths or col < case.key_lengths[sequence])
            and (mask is None or mask.is_floating_point() or bool(mask[0, 0, row, col]))
        )

    sizes = [(n, n) for n in case.lengths] or [(case.len_q, case.len_k)] * case.batch
    return case.heads_q * sum(
        seen(sequence, row, col)
        for sequence, (rows, cols) in enumerate(sizes)
        for row in range(rows)
        for col in range(cols)
    )


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_visible_pairs(options):
    case = make_case(**options)
    mask = make_tensors(case, "cpu").mask
    assert visible_pairs(case, mask) == counted(case, mask)


@pytest.mark.parametrize("op", ["flash_attention", "naive_attention"])
def test_operations_are_those_of_the_package(op):
    pairs = 1000
    forward, backward, training = (
        attention_flops(make_case(direction, op), pairs)
        for direction in ("forward", "backward", "training")
    )
    assert forward == _flops.attention_flops(pairs, 8, 8)
    wanted, kept = [True] * 3, op == "naive_attention"
    assert backward == _flops.attention_backward_flops(pairs, 8, 8, wanted, kept)
    assert training == forward + backward


def test_bytes_are_those_of_inputs_and_results():
    case = make_case(direction="training", mask="float")
    t = make_tensors(case, "cpu")
    tensors = sum(x.numel() * x.element_size() for x in (t.query, t.key, t.value, t.query, t.mask))
    lse = 4 * t.query[..., 0].numel()
    # Backward reads all of that and grad_out, and writes a gradient for each input.
    again = tensors + t.query.nbytes
    gradients = sum(x.numel() * x.element_size() for x in (t.query, t.key, t.value, t.mask))
    assert attention_bytes(case) == tensors + lse + again + lse + gradients
    assert isinstance(t.mask, torch.Tensor)
