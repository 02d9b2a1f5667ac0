"""The tests' own formula, held against published vectors, torch's attention and simple facts."""

from __future__ import annotations

import formula
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from checks import run
from problems import Problem, build, pairwise

INFINITY = float("inf")


@pytest.mark.parametrize("counter, key, expected", [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
], ids=["zeros", "ones", "pi"])  # fmt: skip
def test_philox_of_ten_rounds(counter, key, expected):
    """Known answers of the Random123 distribution."""
    words = formula.philox4x32([np.array(word) for word in counter], key, rounds=10)
    assert [int(word) for word in words] == expected


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=str)
def test_agrees_with_torch(heads, causal, mask):
    problem = Problem(
        dtype="fp64", heads_q=heads[0], heads_kv=heads[1], len_q=9, len_k=9, mask=mask
    )
    (query, key, value), options = build(problem)
    if mask == "bool":
        options["attn_mask"][..., 0] = True  # torch's rows without keys are another matter
    attn_mask = options.get("attn_mask")
    if causal and attn_mask is not None:
        lower = torch.ones(9, 9, dtype=torch.bool).tril()
        attn_mask = (
            attn_mask & lower if mask == "bool" else attn_mask.masked_fill(~lower, -INFINITY)
        )
        attn_mask[..., 0] = True if mask == "bool" else 0.5
        options["attn_mask"][..., 0] = True if mask == "bool" else 0.5

    def by_torch(query, key, value, **_):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=causal and mask is None,
            enable_gqa=True,
        )  # fmt: skip
        return formula.Results(out, out.sum(-1), None, None)

    upstream = [torch.randn(2, heads[0], 9, 32, dtype=torch.float64), None]
    wanted = ["query", "key", "value"]
    ours = run(
        formula.attention,
        [query, key, value],
        {**options, "causal": causal},
        upstream,
        wanted=wanted,
    )
    theirs = run(by_torch, [query, key, value], {}, upstream, wanted=wanted)
    assert torch.allclose(ours[0].out, theirs[0].out, atol=1e-12)
    for name in wanted:
        assert torch.allclose(ours[1][name], theirs[1][name], atol=1e-12), name


def test_weights_and_lse_are_consistent():
    tensors, options = build(
        Problem(dtype="fp64", softcap=3.0, mask="float", causal=True, len_k=17)
    )
    options["attn_mask"][..., 0] = 0.25  # every row sees a key
    results = formula.attention(*tensors, **options)
    scores = 3.0 * torch.tanh(tensors[0] @ tensors[1].mT / 32**0.5 / 3.0) + options["attn_mask"]
    scores = scores.masked_fill(~torch.ones(17, 17, dtype=torch.bool).tril(), -INFINITY)
    assert torch.allclose(results.lse, scores.logsumexp(-1))
    assert torch.allclose(results.weights, (scores - results.lse.unsqueeze(-1)).exp())
    assert torch.allclose(results.max_logits, scores.flatten(2).amax(-1))


def test_every_gradient_by_differences():
    problem = Problem(
        dtype="fp64", batch=1, heads_q=2, heads_kv=1, len_q=4, len_k=5, head_dim=3, head_dim_v=2,
        mask="float_rows", sinks="fp64", softcap=2.0, dropout_p=0.3, causal=True,
        alignment="bottom_right", alibi="heads",
    )  # fmt: skip
    tensors, options = build(problem)
    names = ("attn_mask", "alibi_slopes", "sinks")
    leaves = [t.double().requires_grad_() for t in (*tensors, *(options[name] for name in names))]

    def function(query, key, value, *others):
        changed = options | dict(zip(names, others, strict=True))
        results = formula.attention(query, key, value, **changed)
        return results.out, results.lse.masked_fill(results.lse == -INFINITY, 0.0)

    leaves[3].data.clamp_(min=-50.0)  # -inf has no neighbourhood
    assert torch.autograd.gradcheck(function, leaves)


def test_packed_is_dense_per_sequence():
    tensors, options = build(
        Problem(dtype="fp64", lengths=((3, 5), (0, 2), (4, 4)), causal=True, gap=2)
    )
    options = {k: v for k, v in options.items() if not k.startswith("max_")}
    packed = formula.packed_attention(*tensors, **options)
    begin_q, begin_k = int(options["cu_seqlens_q"][2]), int(options["cu_seqlens_k"][2])
    last = [
        tensors[0][begin_q : begin_q + 4],
        *(tensor[begin_k : begin_k + 4] for tensor in tensors[1:]),
    ]
    dense = formula.attention(
        *(tensor.transpose(0, 1).unsqueeze(0) for tensor in last), causal=True
    )
    assert torch.equal(packed.out[begin_q : begin_q + 4].transpose(0, 1), dense.out[0])
    assert not packed.out[begin_q + 4 :].count_nonzero()


def test_rows_without_keys_and_rows_of_finfo_min():
    query, key, value = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.zeros(3, 3, dtype=torch.float64)
    mask[1], mask[2] = -INFINITY, torch.finfo(torch.float64).min
    upstream = [torch.randn(1, 1, 3, 4, dtype=torch.float64), torch.randn(1, 1, 3).double()]
    results, gradients = run(formula.attention, [query, key, value], {"attn_mask": mask}, upstream)
    assert not results.out[0, 0, 1].count_nonzero() and results.lse[0, 0, 1] == -INFINITY
    assert torch.allclose(results.out[0, 0, 2], value[0, 0].mean(0))
    assert not gradients["query"][0, 0, 1].count_nonzero()
    assert not gradients["attn_mask"][1].count_nonzero()
    assert torch.allclose(gradients["attn_mask"][2].sum(), upstream[1][0, 0, 2])


def test_magnitudes_bound_the_gradients():
    problem = Problem(
        dtype="fp64", heads_q=4, mask="float", alibi="batch", alignment="top_left", sinks="fp64"
    )
    tensors, options = build(problem)
    upstream = [torch.randn(2, 4, 17, 32).double(), torch.randn(2, 4, 17).double()]
    _, gradients = run(formula.attention, tensors, options, upstream, torch.float64)
    _, sums = run(
        lambda **named: formula.attention(magnitudes=True, **named), tensors, options, upstream,
        torch.float64,
    )  # fmt: skip
    for name, gradient in gradients.items():
        assert (gradient.abs() <= sums[name].abs() * (1 + 1e-9) + 1e-12).all(), name


def test_pairs_are_all_there():
    factors = {"a": (1, 2, 3), "b": (True, False), "c": tuple("wxyz"), "d": (0, 1)}
    chosen = list(pairwise(factors))
    assert len(chosen) < 3 * 2 * 4 * 2
    for a in factors:
        for b in factors:
            for x in factors[a]:
                for y in factors[b]:
                    assert a == b or any(c[a] == x and c[b] == y for c in chosen)
