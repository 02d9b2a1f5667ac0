"""torch.library.opcheck on every op: schema, autograd registration, fake kernel, AOT."""

from __future__ import annotations

import pytest
import torch
from calls import DENSE, RNG_STATE, attention_inputs, random_tensor
from layouts import lay_out
from torch.library import opcheck

ops = torch.ops.flashattn_ext
LAYOUTS = ["contiguous", "blhd", "bhdl", "sliced", "offset_by_one", "odd_singletons", "expanded_1"]
SIZES = {
    "usual": {},
    "one row": {"len_q": 1, "len_k": 1, "batch": 1},
    "no keys": {"len_k": 0},
    "no heads": {"heads_q": 0, "heads_kv": 0},
}
# Without gradients and AOT, for a grid that would be slow with them.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def inputs(layout="contiguous", dtype=torch.float32, requires_grad=True, **sizes):
    tensors = attention_inputs(dtype, **sizes)
    return tuple(lay_out(x, layout).detach().requires_grad_(requires_grad) for x in tensors)


def raw_options(option, dtype=torch.float32, requires_grad=False):
    """The options of a raw op: window as two arguments, floating ones in dtypes that it takes."""
    options = dict(DENSE[option])
    options["window_left"], options["window_right"] = options.pop("window", (None, None))
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            kind = torch.float32 if name == "alibi_slopes" else dtype
            options[name] = value.to(kind).requires_grad_(requires_grad)
    return options


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_results_are_like_the_real_ones(layout, dtype, size):  # O2, L9
    tensors = inputs(layout, dtype, **SIZES[size])
    low = {"return_max_logits": True, "return_low": True}
    opcheck(ops.flash_attention_forward.default, tensors, low, test_utils=QUICK)
    both = {"return_max_logits": True, "return_weights": True}
    opcheck(ops.naive_attention_forward.default, tensors, both, test_utils=QUICK)

    out, lse, _, *lows = ops.flash_attention_forward(*tensors, **low)
    grad_out = random_tensor(*out.shape, dtype=dtype)
    saved = [tensor.detach() for tensor in (*tensors, out, lse, *lows)]
    arguments = (grad_out, None, *saved, [True, True, True, False, False, False])
    opcheck(ops.flash_attention_backward.default, arguments, test_utils=QUICK)


@pytest.mark.parametrize("layout", ["contiguous", "blhd", "expanded_1"])
def test_dense_with_gradients(layout):
    tensors = inputs(layout)
    opcheck(ops.flash_attention_forward.default, tensors)
    opcheck(ops.naive_attention_forward.default, tensors, {"return_weights": True})


@pytest.mark.parametrize("option", ["bool_mask", "everything"])
def test_dense_with_options(option):
    options = raw_options(option, requires_grad=True)
    opcheck(ops.flash_attention_forward.default, inputs(), options)
    opcheck(ops.naive_attention_forward.default, inputs(), options)


WANTED = ([True] * 6, [True, False, True, True, False, False], [False] * 6)


@pytest.mark.parametrize(
    ("option", "requires_grad", "wanted"),
    [*(("everything", False, wanted) for wanted in WANTED), ("causal", True, WANTED[0])],
    ids=str,
)
def test_dense_backward(option, requires_grad, wanted):
    tensors, options = inputs(requires_grad=requires_grad), raw_options(option)
    out, lse, _, *lows = ops.flash_attention_forward(*tensors, **options, return_low=True)
    upstream = (random_tensor(*out.shape, dtype=out.dtype), torch.ones_like(lse))
    kept = [tensor.detach() for tensor in (out, lse, *lows)]
    opcheck(ops.flash_attention_backward.default, (*upstream, *tensors, *kept, wanted), options)
    out, lse, _, weights, probs = ops.naive_attention_forward(
        *tensors, **options, return_weights=True
    )
    upstream = (*upstream, random_tensor(*weights.shape, dtype=out.dtype))
    kept = (probs.detach(), lse.detach())
    opcheck(ops.naive_attention_backward.default, (*upstream, *tensors, *kept, wanted), options)


def packed(requires_grad):
    sizes = ((8, 4, 3), (9, 2, 3), (9, 2, 4))
    tensors = [random_tensor(*size, dtype=torch.float32) for size in sizes]
    offsets = (torch.tensor([0, 3, 3, 7]), torch.tensor([0, 2, 5, 8], dtype=torch.int32))
    options = {
        "alibi_slopes": torch.rand(3, 4),
        "sinks": torch.randn(4),
        "seqused_k": torch.tensor([2, 3, 1]),
        "dropout_p": 0.2,
        "rng_state": torch.tensor(RNG_STATE),
        "causal": True,
    }
    for tensor in (*tensors, options["alibi_slopes"], options["sinks"]):
        tensor.requires_grad_(requires_grad)
    return (*tensors, *offsets, 4, 3), options


def test_packed():
    tensors, options = packed(requires_grad=True)
    opcheck(ops.flash_attention_varlen_forward.default, tensors, options)
    low = {"return_low": True, "return_max_logits": True}
    opcheck(ops.flash_attention_varlen_forward.default, tensors, low, test_utils=QUICK)


@pytest.mark.parametrize("wanted", [[True] * 5, [False, True, False, False, True]], ids=str)
def test_packed_backward(wanted):
    tensors, options = packed(requires_grad=False)
    out, lse, _, *lows = ops.flash_attention_varlen_forward(*tensors, **options, return_low=True)
    arguments = (torch.ones_like(out), torch.ones_like(lse), *tensors, out, lse, *lows, wanted)
    opcheck(ops.flash_attention_varlen_backward.default, arguments, options)


@pytest.mark.parametrize("view", ["contiguous", "transposed", "sliced", "scalar"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name, view):
    x = random_tensor(3, 4, 5, dtype=torch.float32)
    views = {
        "contiguous": x,
        "transposed": x.transpose(0, 2),
        "sliced": x[::2, 1:],
        "scalar": x[0, 0, 0],
    }
    x = views[view].detach().requires_grad_()
    opcheck(getattr(ops, name).default, (x, -1))
    opcheck(getattr(ops, name).default, (x, 0), {"dtype": torch.float64}, test_utils=QUICK)
    grad = torch.ones_like(x)
    backward = getattr(ops, f"{name}_backward").default
    opcheck(backward, (grad, x.detach(), -1, torch.float16), test_utils=QUICK)


def test_dropout_mask():
    opcheck(ops.dropout_mask.default, (torch.tensor(RNG_STATE), 2, 3, 4, 5, 0.3))


def test_public_ops():
    causal = {"causal": True, "window": (None, 1), "alignment": "top_left"}
    opcheck(ops.flash_attention.default, inputs(), causal)
    opcheck(ops.flash_attention.lse, inputs(), {"return_lse": True})
    both = {"return_max_logits": True, "return_weights": True}
    opcheck(ops.naive_attention.max_logits_and_weights, inputs(), both)
    opcheck(ops.flash_attention_varlen.default, packed(requires_grad=True)[0])
    out, lse = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4)
    opcheck(ops.merge_states.default, (out, lse, out + 1, lse - 1))
    opcheck(ops.reserve_rng.default, ("cpu",))
