"""explain: which kernel, and why, without running anything."""

from __future__ import annotations

import pytest
import torch
from calls import attention_inputs
from sdpa_calls import calls_of
from torch.autograd.forward_ad import dual_level, make_dual
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import flashattn_ext
from flashattn_ext import explain

OPS = ("flash_attention_forward", "naive_attention_forward")
SDPA = "scaled_dot_product_attention"


def inputs(dtype=torch.float32, **sizes):
    return attention_inputs(dtype, heads_kv=4, **sizes)


@pytest.mark.parametrize("function", ["flash_attention", "naive_attention", SDPA])
def test_names_a_kernel_and_a_reason(function, device):
    tensors = [tensor.to(device) for tensor in inputs()]
    found = explain(*tensors, function=function)
    assert found.function == function
    assert found.kernel.startswith(device) and found.reason
    assert str(found) == f"{function} runs [{found.kernel}] because {found.reason}"


def test_takes_the_arguments_of_the_call():
    tensors = inputs()
    options = {"causal": True, "alignment": "top_left", "softcap": 2.0, "dropout_p": 0.1}
    assert explain(*tensors, **options).kernel.startswith("cpu")
    assert explain(*tensors, None, 0.1, True, function=SDPA).kernel.startswith("cpu")
    assert explain(*tensors, function=flashattn_ext.naive_attention).function == "naive_attention"
    offsets = torch.tensor([0, 3])
    packed = [tensor[0].transpose(0, 1) for tensor in tensors]
    found = explain(*packed, offsets, offsets, 3, 5, function="flash_attention_varlen")
    assert found.kernel.startswith("cpu")


def test_names_the_instruction_set_of_the_cpu():
    sets = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")
    assert explain(*inputs()).reason.rsplit(" ", 1)[1] in sets


def test_runs_nothing_and_draws_nothing():
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    assert calls_of(explain, *inputs(), dropout_p=0.5) == []
    assert torch.rand(()) == expected


def test_naive_says_that_it_is_not_the_fast_one():
    assert "flash_attention" in explain(*inputs(), function="naive_attention").reason


def test_tangents_go_through_the_formula():
    query, key, value = inputs()
    with dual_level():
        found = explain(make_dual(query, query), key, value)
    assert found.kernel == "formula" and "forward-mode" in found.reason


def test_meta_tensors_have_shapes_only():
    assert explain(*[tensor.to("meta") for tensor in inputs()]).kernel == "meta: shapes only"


def sparse(query, key, value):
    return query.to_sparse(), key, value


class Subclass(torch.Tensor):
    pass


LEFT_TO_TORCH = {
    "dtype": (lambda q, k, v: (q.int(), k, v), "torch.int32"),
    "complex": (lambda q, k, v: (q.to(torch.complex64), k, v), "complex64"),
    "rank": (lambda q, k, v: (q[0, 0, 0], k, v), "fewer than 2 dimensions"),
    "head_dim": (lambda q, k, v: (torch.ones(1, 513),) * 3, "above 512"),
    "sparse": (sparse, "sparse"),
    "subclass": (lambda q, k, v: (q, k.as_subclass(Subclass), v), "Subclass"),
    "mask": (lambda q, k, v: (q, k, v, torch.ones(3, 5).as_subclass(Subclass)), "Subclass"),
}


@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_what_sdpa_leaves_to_torch(case):
    change, reason = LEFT_TO_TORCH[case]
    found = explain(*change(*inputs()), function=SDPA)
    assert found.kernel == "torch" and reason in found.reason


def test_sdpa_kernel_leaves_it_to_torch():
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        found = explain(*inputs(), function=SDPA)
    assert found.kernel == "torch" and "sdpa_kernel" in found.reason
    with sdpa_kernel(SDPBackend.MATH):  # it restricts torch's backends, not ours
        assert explain(*inputs()).kernel.startswith("cpu")


def test_causal_bias_is_ours():
    found = explain(*inputs(), causal_lower_right(3, 5), function=SDPA)
    assert found.kernel.startswith("cpu")


def test_unknown_function():
    with pytest.raises(ValueError, match="flashattn_ext: function: expected one of "):
        explain(*inputs(), function="softmax")
