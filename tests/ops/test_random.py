"""reserve_rng: draws from torch's generator, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from calls import attention_inputs

import flashattn_ext
from flashattn_ext import reserve_rng

DRAWS = [reserve_rng, torch.ops.flashattn_ext.reserve_rng]


@pytest.fixture(params=DRAWS, ids=["function", "op"])
def draw(request):
    return request.param


def test_what_it_returns(draw, device):
    state = draw(device)
    assert state.dtype == torch.int64 and state.shape == (2,)
    assert state.device.type == device
    assert draw(torch.device(device)).device == state.device


def test_follows_the_seed(draw, device):  # R8
    torch.manual_seed(5)
    first, second = draw(device), draw(device)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(draw(device), first)


def test_moves_the_generator_on(draw, device):  # R2
    torch.manual_seed(5)
    untouched = torch.rand((), device=device)
    torch.manual_seed(5)
    draw(device)
    assert torch.rand((), device=device) != untouched


def test_fork_rng(draw, device):
    torch.manual_seed(5)
    expected = torch.rand((), device=device)
    torch.manual_seed(5)
    with torch.random.fork_rng():
        draw(device)
    assert torch.rand((), device=device) == expected


def test_states_are_spread_over_64_bits(draw):
    states = torch.stack([draw("cpu") for _ in range(64)])
    for column in states.unbind(1):
        assert column.unique().numel() == 64
        for bit in range(63):
            assert 10 < (column >> bit & 1).sum() < 54


def test_is_the_only_random_op():
    tag = torch.Tag.nondeterministic_seeded
    namespace = torch.ops.flashattn_ext
    tagged = []
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("flashattn_ext::"):
            packet = getattr(namespace, schema.name.split("::")[1])
            if tag in getattr(packet, schema.overload_name or "default").tags:
                tagged.append(schema.name)
    assert tagged == ["flashattn_ext::reserve_rng"]


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, float("nan")])
def test_a_wrong_rate_draws_nothing(dropout_p):  # R14
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="flashattn_ext: dropout_p: expected a probability"):
        flashattn_ext.flash_attention(*attention_inputs(), dropout_p=dropout_p)
    assert torch.rand(()) == expected
