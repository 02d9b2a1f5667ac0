"""Bad input: an exception that names the argument, what was expected and what came."""

from __future__ import annotations

import re

import pytest
import torch
from problems import Problem, build

import flashattn_ext

OPS = ("flash_attention_forward", "flash_attention_varlen_forward")
ERRORS = (RuntimeError, ValueError, TypeError)


def dense(op, device="cpu", **changes):
    """A good dense call with some arguments replaced."""
    problem = Problem(batch=2, heads_q=4, heads_kv=2, len_q=5, len_k=7, head_dim=8, head_dim_v=6)
    (query, key, value), _ = build(problem, device)
    arguments = {"query": query, "key": key, "value": value} | changes
    return getattr(flashattn_ext, op)(**arguments)


def packed(device="cpu", **changes):
    """A good packed call of two sequences with some arguments replaced."""
    problem = Problem(lengths=((5, 7), (3, 2)), heads_q=4, head_dim=8, head_dim_v=6)
    (query, key, value), options = build(problem, device)
    arguments = {"query": query, "key": key, "value": value} | options | changes
    return flashattn_ext.flash_attention_varlen(**arguments)


def refused(call, argument, expected, got, **changes):
    """`expected` and `got` are patterns that the message must hold behind the argument's name."""
    with pytest.raises(ERRORS) as caught:
        call(**changes)
    message = str(caught.value)
    pattern = rf"(?<!\w){re.escape(argument)}(?!\w).*({expected}).*({got})"
    found = re.search(pattern, message, re.DOTALL | re.IGNORECASE)
    assert found, f"{pattern!r} is not in:\n{message}"


def t(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


STATE = ints(1, 2, dtype=torch.int64)

# name: (changes, argument, expected, got)
BOTH = {  # wrong in dense and naive calls alike
    "query rank": ({"query": t(4, 5, 8)}, "query", "4 dim", r"\(4, 5, 8\)"),
    "key rank": ({"key": t(2, 7, 8)}, "key", "4 dim", r"\(2, 7, 8\)"),
    "value rank": ({"value": t(1, 2, 2, 7, 6)}, "value", "4 dim", r"\(1, 2, 2, 7, 6\)"),
    "key batch": ({"key": t(3, 2, 7, 8)}, "key", "batch 2|batch of query", r"\(3, 2, 7, 8\)"),
    "value batch": ({"value": t(1, 2, 7, 6)}, "value", "batch 2|batch of query", r"\(1, 2, 7, 6\)"),
    "key head_dim": ({"key": t(2, 2, 7, 9)}, "key", "head_dim", r"\(2, 2, 7, 9\)"),
    "value heads": ({"value": t(2, 4, 7, 6)}, "value", "heads", r"\(2, 4, 7, 6\)"),
    "value length": ({"value": t(2, 2, 8, 6)}, "value", "length", r"\(2, 2, 8, 6\)"),
    "heads ratio": (
        {"key": t(2, 3, 7, 8), "value": t(2, 3, 7, 6)}, "query", "multiple of heads_kv.*3", "4",
    ),
    "no key heads": ({"key": t(2, 0, 7, 8), "value": t(2, 0, 7, 6)}, "query", "multiple", "4"),
    "head_dim 513": ({"query": t(2, 4, 5, 513), "key": t(2, 2, 7, 513)}, "query", "512", "513"),
    "head_dim_v 513": ({"value": t(2, 2, 7, 513)}, "value", "512", "513"),
    "query int": ({"query": t(2, 4, 5, 8, dtype=torch.int64)}, "query", "float16", "[Ll]ong|int64"),
    "all int8": (
        {name: t(2, 2, 5, 8, dtype=torch.int8) for name in ("query", "key", "value")},
        "query", "float16", "[Cc]har|int8",
    ),
    "query complex": (
        {"query": t(2, 4, 5, 8, dtype=torch.complex64)}, "query", "float16", "complex",
    ),
    "query fp8": (
        {"query": t(2, 4, 5, 8, dtype=torch.float8_e4m3fn)}, "query", "float16", "float8",
    ),
    "key dtype": ({"key": t(2, 2, 7, 8, dtype=torch.float16)}, "key", "float", "half|float16"),
    "value dtype": (
        {"value": t(2, 2, 7, 6, dtype=torch.float64)}, "value", "float", "double|float64",
    ),
    "key device": ({"key": t(2, 2, 7, 8).to("meta")}, "key", "device|cpu", "meta|another"),
    "value device": ({"value": t(2, 2, 7, 6).to("meta")}, "value", "device|cpu", "meta|another"),
    "mask too long": ({"attn_mask": t(5, 8)}, "attn_mask", r"\(2, 4, 5, 7\)", r"\(5, 8\)"),
    "mask too short": ({"attn_mask": t(5, 6)}, "attn_mask", r"\(2, 4, 5, 7\)", r"\(5, 6\)"),
    "mask batch": ({"attn_mask": t(3, 1, 5, 7)}, "attn_mask", "broadcasts", r"\(3, 1, 5, 7\)"),
    "mask heads": ({"attn_mask": t(2, 2, 5, 7)}, "attn_mask", "broadcasts", r"\(2, 2, 5, 7\)"),
    "mask 5-D": ({"attn_mask": t(1, 2, 4, 5, 7)}, "attn_mask", "broadcasts", r"\(1, 2, 4, 5, 7\)"),
    "mask of size 0": ({"attn_mask": t(5, 0)}, "attn_mask", "broadcasts", r"\(5, 0\)"),
    "mask int": (
        {"attn_mask": t(5, 7, dtype=torch.int64)}, "attn_mask", "bool", "long|int64",
    ),
    "mask uint8": ({"attn_mask": t(5, 7, dtype=torch.uint8)}, "attn_mask", "bool", "byte|uint8"),
    "mask fp16 for fp32": (
        {"attn_mask": t(5, 7, dtype=torch.float16)}, "attn_mask", "bool", "half|float16",
    ),
    "mask fp64 for fp32": (
        {"attn_mask": t(5, 7, dtype=torch.float64)}, "attn_mask", "bool", "double|float64",
    ),
    "mask device": ({"attn_mask": t(5, 7).to("meta")}, "attn_mask", "device|cpu", "meta|another"),
    "key_lengths shape": ({"key_lengths": ints(3)}, "key_lengths", r"\(2,\)", r"\(1,\)"),
    "key_lengths rank": ({"key_lengths": ints([3, 2])}, "key_lengths", r"\(2,\)", r"\(1, 2\)"),
    "key_lengths dtype": (
        {"key_lengths": t(2)}, "key_lengths", "int32 or int64", "float",
    ),
    "key_lengths int16": (
        {"key_lengths": ints(3, 2, dtype=torch.int16)}, "key_lengths", "int32", "short|int16",
    ),
    "key_lengths too long": ({"key_lengths": ints(3, 8)}, "key_lengths[1]", "0 to 7", "8"),
    "key_lengths negative": ({"key_lengths": ints(-1, 2)}, "key_lengths[0]", "0 to 7", "-1"),
    "key_lengths device": (
        {"key_lengths": ints(3, 2).to("meta")}, "key_lengths", "device|cpu", "meta|another",
    ),
    "no alignment, causal": ({"causal": True}, "alignment", "top_left.*bottom_right", "None"),
    "no alignment, window": ({"window": (2, 2)}, "alignment", "top_left.*bottom_right", "None"),
    "no alignment, ALiBi": ({"alibi_slopes": t(4)}, "alignment", "top_left.*bottom_right", "None"),
    "unknown alignment": (
        {"causal": True, "alignment": "upper"}, "alignment", "top_left.*bottom_right", "upper",
    ),
    "alignment spelled otherwise": (
        {"causal": True, "alignment": "TOP_LEFT"}, "alignment", "top_left", "TOP_LEFT",
    ),
    "unknown alignment, unused": ({"alignment": "x"}, "alignment", "top_left.*bottom_right", "x"),
    "window left": (
        {"window": (-1, 2), "alignment": "top_left"}, "window", "0", "-1",
    ),
    "window right": ({"window": (1, -2), "alignment": "top_left"}, "window", "0", "-2"),
    "window of one": ({"window": (1,), "alignment": "top_left"}, "window", "pair", r"\(1,\)"),
    "window of three": ({"window": (1, 2, 3), "alignment": "top_left"}, "window", "pair", "3"),
    "window int": ({"window": 5, "alignment": "top_left"}, "window", "pair", "5"),
    "window float": ({"window": (1.5, 2), "alignment": "top_left"}, "window", "int", "1.5"),
    "dropout_p negative": ({"dropout_p": -0.1}, "dropout_p", "0 to 1", "-0.1"),
    "dropout_p above 1": ({"dropout_p": 1.01}, "dropout_p", "0 to 1", "1.01"),
    "dropout_p NaN": ({"dropout_p": float("nan")}, "dropout_p", "0 to 1", "nan"),
    "rng_state dtype": (
        {"dropout_p": 0.5, "rng_state": ints(1, 2)}, "rng_state", "long|int64", "int",
    ),
    "rng_state shape": (
        {"dropout_p": 0.5, "rng_state": ints(1, 2, 3, dtype=torch.int64)}, "rng_state", r"\(2,\)",
        r"\(3,\)",
    ),
    "rng_state shape at rate 0": (
        {"rng_state": ints(1, dtype=torch.int64)}, "rng_state", r"\(2,\)", r"\(1,\)",
    ),
    "rng_state device": (
        {"dropout_p": 0.5, "rng_state": STATE.to("meta")}, "rng_state", "device|cpu",
        "meta|another",
    ),
    "softcap negative": ({"softcap": -1.0}, "softcap", "0", "-1"),
    "softcap NaN": ({"softcap": float("nan")}, "softcap", "0", "nan"),
    "slopes shape": (
        {"alibi_slopes": t(2), "alignment": "top_left"}, "alibi_slopes", r"\(4,\).*\(2, 4\)",
        r"\(2,\)",
    ),
    "slopes batch": (
        {"alibi_slopes": t(1, 4), "alignment": "top_left"}, "alibi_slopes", r"\(2, 4\)",
        r"\(1, 4\)",
    ),
    "slopes dtype": (
        {"alibi_slopes": t(4, dtype=torch.float16), "alignment": "top_left"}, "alibi_slopes",
        "float32", "half|float16",
    ),
    "slopes device": (
        {"alibi_slopes": t(4).to("meta"), "alignment": "top_left"}, "alibi_slopes", "device|cpu",
        "meta|another",
    ),
    "sinks shape": ({"sinks": t(2)}, "sinks", r"\(4,\)", r"\(2,\)"),
    "sinks rank": ({"sinks": t(2, 4)}, "sinks", r"\(4,\)", r"\(2, 4\)"),
    "sinks int": ({"sinks": ints(1, 2, 3, 4)}, "sinks", "float", "int"),
    "sinks device": ({"sinks": t(4).to("meta")}, "sinks", "device|cpu", "meta|another"),
}  # fmt: skip

PACKED = {
    "query rank": ({"query": t(1, 8, 4, 8)}, "query", "3 dim", r"\(1, 8, 4, 8\)"),
    "key rank": ({"key": t(9, 8)}, "key", "3 dim", r"\(9, 8\)"),
    "value length": ({"value": t(10, 2, 6)}, "value", "length", r"\(10, 2, 6\)"),
    "heads ratio": (
        {"key": t(9, 3, 8), "value": t(9, 3, 6)}, "query", "multiple of heads_kv.*3", "4",
    ),
    "cu_q float": ({"cu_seqlens_q": t(3)}, "cu_seqlens_q", "int32 or int64", "float"),
    "cu_k int16": (
        {"cu_seqlens_k": ints(0, 7, 9, dtype=torch.int16)}, "cu_seqlens_k", "int32",
        "short|int16",
    ),
    "cu_q empty": ({"cu_seqlens_q": ints()}, "cu_seqlens_q", r"sequences \+ 1", r"\(0,\)"),
    "cu_q rank": ({"cu_seqlens_q": ints([0, 5, 8])}, "cu_seqlens_q", r"sequences \+ 1", r"1, 3"),
    "cu_k count": ({"cu_seqlens_k": ints(0, 9)}, "cu_seqlens_k", r"\(3,\)", r"\(2,\)"),
    "cu_q decreasing": ({"cu_seqlens_q": ints(0, 5, 4)}, "cu_seqlens_q[2]", "5 to 8", "4"),
    "cu_k decreasing": ({"cu_seqlens_k": ints(3, 2, 9)}, "cu_seqlens_k[1]", "3 to 9", "2"),
    "cu_q negative": ({"cu_seqlens_q": ints(-1, 5, 8)}, "cu_seqlens_q[0]", "0 to 8", "-1"),
    "cu_q past the end": ({"cu_seqlens_q": ints(0, 5, 9)}, "cu_seqlens_q[2]", "5 to 8", "9"),
    "cu_k three times": ({"cu_seqlens_k": ints(0, 7, 27)}, "cu_seqlens_k[2]", "7 to 9", "27"),
    "cu_q device": (
        {"cu_seqlens_q": ints(0, 5, 8).to("meta")}, "cu_seqlens_q", "device|cpu", "meta|another",
    ),
    "max_q too small": ({"max_seqlen_q": 4}, "max_seqlen_q", "5", "4"),
    "max_k too small": ({"max_seqlen_k": 6}, "max_seqlen_k", "7", "6"),
    "max_q negative": ({"max_seqlen_q": -1}, "max_seqlen_q", "0", "-1"),
    "max_q tensor": ({"max_seqlen_q": ints(5)}, "max_seqlen_q", "int", "Tensor"),
    "used_q shape": ({"seqused_q": ints(5)}, "seqused_q", r"\(2,\)", r"\(1,\)"),
    "used_k dtype": ({"seqused_k": t(2)}, "seqused_k", "int32 or int64", "float"),
    "used_q too long": ({"seqused_q": ints(5, 4)}, "seqused_q[1]", "0 to 3", "4"),
    "used_k negative": ({"seqused_k": ints(-2, 2)}, "seqused_k[0]", "0 to 7", "-2"),
    "slopes shape": ({"alibi_slopes": t(3, 4)}, "alibi_slopes", r"\(2, 4\)", r"\(3, 4\)"),
    "unknown alignment": ({"alignment": "left"}, "alignment", "top_left", "left"),
    "window": ({"window": (0, -3)}, "window", "0", "-3"),
    "dropout_p": ({"dropout_p": 2.0}, "dropout_p", "0 to 1", "2"),
    "softcap": ({"softcap": -0.5}, "softcap", "0", "-0.5"),
}  # fmt: skip


@pytest.mark.parametrize("op", ["flash_attention", "naive_attention"])
@pytest.mark.parametrize("case", BOTH)
def test_dense(case, op):  # M7, W2, T3, V10, R14, S8
    changes, argument, expected, got = BOTH[case]
    refused(lambda **changed: dense(op, **changed), argument, expected, got, **changes)


@pytest.mark.parametrize("case", PACKED)
def test_packed(case):  # V6, V8, V10
    changes, argument, expected, got = PACKED[case]
    refused(packed, argument, expected, got, **changes)


@pytest.mark.parametrize("name", ["attn_mask", "key_lengths"])
def test_packed_calls_know_no_dense_arguments(name):
    with pytest.raises(TypeError, match=name):
        packed(**{name: t(2)})


@pytest.mark.parametrize("op", ["flash_attention", "naive_attention"])
def test_an_unknown_argument_is_not_ignored(op):  # X3: a flag that is accepted and dropped
    for name in ("is_causal", "dropout", "window_size", "softmax_scale"):
        with pytest.raises(TypeError, match=name):
            dense(op, **{name: 1})


NONSENSE = {
    "query": ["query", None, 3.0, [[1.0]]],
    "key": [None, "key"],
    "attn_mask": ["causal", 3, [[True]]],
    "key_lengths": [3, [3, 2]],
    "scale": ["0.1", [1.0]],
    "softcap": ["1", None],
    "dropout_p": ["0.1", None],
    "alignment": [3],
    "window": ["ab", {"left": 1}],
    "alibi_slopes": [0.5, [0.1, 0.2, 0.3, 0.4]],
    "sinks": [0.5],
    "rng_state": [17, (1, 2)],
    "causal": ["yes", []],
}


@pytest.mark.parametrize("op", ["flash_attention", "naive_attention"])
@pytest.mark.parametrize("name", NONSENSE)
def test_values_of_another_kind(name, op):
    """Whoever says so, torch's dispatcher or the package: the argument is named."""
    for value in NONSENSE[name]:
        with pytest.raises(ERRORS, match=name):
            dense(
                op,
                **{name: value, "alignment": "top_left"} if name != "alignment" else {name: value},
            )


def test_nothing_is_drawn_for_a_bad_call():
    torch.manual_seed(2)
    expected = torch.rand(1)
    torch.manual_seed(2)
    with pytest.raises(ERRORS):
        dense("flash_attention", dropout_p=1.5)
    assert torch.equal(torch.rand(1), expected)


def test_good_calls_are_good():
    """The calls that the cases above break are themselves in order."""
    assert dense("flash_attention").shape == (2, 4, 5, 6)
    assert dense("naive_attention").shape == (2, 4, 5, 6)
    assert packed().shape == (8, 4, 6)


@pytest.mark.parametrize("changes, argument, expected, got", [
    ({"lse_a": t(2, 3, 6)}, "lse_a", r"\(2, 3, 5\)", r"\(2, 3, 6\)"),
    ({"lse_b": t(2, 5, 3)}, "lse_b", r"\(2, 3, 5\)", r"\(2, 5, 3\)"),
    ({"out_b": t(2, 3, 5, 9)}, "out_b", r"\(2, 3, 5, 8\)", r"\(2, 3, 5, 9\)"),
    ({"out_a": t(5, 8)}, "out_a", "3.*4 dim", r"\(5, 8\)"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_merge_states(changes, argument, expected, got):
    good = {
        "out_a": t(2, 3, 5, 8),
        "lse_a": t(2, 3, 5),
        "out_b": t(2, 3, 5, 8),
        "lse_b": t(2, 3, 5),
    }
    refused(
        lambda **c: flashattn_ext.merge_states(**(good | c)), argument, expected, got, **changes
    )


@pytest.mark.parametrize("changes, argument, expected, got", [
    ({"rng_state": ints(1, 2)}, "rng_state", "int64", "int"),
    ({"rng_state": ints(1, dtype=torch.int64)}, "rng_state", r"\(2,\)", r"\(1,\)"),
    ({"dropout_p": 1.5}, "dropout_p", "0.*1", "1.5"),
    ({"batch": -1}, "batch", "0", "-1"),
    ({"len_k": -4}, "len_k", "0", "-4"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_dropout_mask(changes, argument, expected, got):
    good = {"rng_state": STATE, "batch": 1, "heads_q": 1, "len_q": 2, "len_k": 2, "dropout_p": 0.5}
    refused(
        lambda **c: flashattn_ext.dropout_mask(**(good | c)), argument, expected, got, **changes
    )
