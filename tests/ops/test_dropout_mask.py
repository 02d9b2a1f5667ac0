"""dropout_mask: the op against the definition, bit by bit, on every device."""

from __future__ import annotations

import pytest
import torch

import flashattn_ext

OPS = ("dropout_mask",)
ROUNDS = 7


def philox(counter, key):
    """Philox4x32 over int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    low = 0xFFFFFFFF

    def product(a, b):  # 32 x 32 bits, in halves, since int64 has a sign
        b_low, b_high = b & 0xFFFF, b >> 16
        first, second = a * b_low, a * b_high
        high = (second + (first >> 16)) >> 16
        return high, (first + ((second & 0xFFFF) << 16)) & low

    for _ in range(ROUNDS):
        high0, low0 = product(0xD2511F53, c0)
        high1, low1 = product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([c0, c1, c2, c3])


def definition(seed, offset, batch, heads_q, len_q, len_k, dropout_p):
    threshold = int((1 - dropout_p) * 65536 + 0.5)
    low = 0xFFFFFFFF
    b, h, i, j = torch.meshgrid(
        *(torch.arange(size) for size in (batch, heads_q, len_q, len_k)), indexing="ij"
    )
    position = b * heads_q + h + offset  # wraps as two's complement does
    group = j // 32 * 4 + j // 2 % 4
    counter = (position & low, (position >> 32) & low, i & low, group & low)
    words = philox(counter, (seed & low, (seed >> 32) & low))
    slot = j // 8 % 4 * 2 + j % 2
    word = words.gather(0, (slot // 2)[None])[0]
    return ((word >> (16 * (slot % 2))) & 0xFFFF) < threshold


@pytest.mark.parametrize("state", ((0, 0), (123456789012345, 7), (-1, 2**62), (-(2**63), -5)))
@pytest.mark.parametrize("len_k", (1, 2, 31, 32, 33, 64, 100))
def test_bits(state, len_k, device):
    sizes = (2, 3, 5, len_k)
    rng_state = torch.tensor(state, device=device)
    got = flashattn_ext.dropout_mask(rng_state, *sizes, 0.3)
    assert got.dtype == torch.bool
    assert got.shape == sizes
    assert torch.equal(got.cpu(), definition(*state, *sizes, 0.3))


@pytest.mark.parametrize("dropout_p", (0.0, 1e-6, 0.1, 0.5, 0.9, 1.0))
def test_rate(dropout_p, device):
    mask = flashattn_ext.dropout_mask(
        torch.tensor([5, 6], device=device), 2, 4, 128, 512, dropout_p
    )
    kept, count = mask.double().mean().item(), mask.numel()
    deviation = (dropout_p * (1 - dropout_p) / count) ** 0.5
    assert abs(kept - (1 - dropout_p)) <= 5 * deviation + 1 / 65536


@pytest.mark.parametrize("sizes", ((0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (1, 2, 3, 0)))
def test_empty(sizes, device):
    mask = flashattn_ext.dropout_mask(torch.tensor([1, 2], device=device), *sizes, 0.5)
    assert mask.shape == sizes


def test_argument_errors(device):
    op = torch.ops.flashattn_ext.dropout_mask.default
    state = torch.tensor([1, 2], device=device)
    with pytest.raises(RuntimeError, match="rng_state: expected dtype int64"):
        op(state.int(), 1, 1, 1, 1, 0.5)
    for wrong in (state[:1], state[None], torch.zeros(3, dtype=torch.int64, device=device)):
        with pytest.raises(RuntimeError, match=r"rng_state: expected shape \(2,\)"):
            op(wrong, 1, 1, 1, 1, 0.5)
    for dropout_p in (-0.1, 1.1, float("nan")):
        with pytest.raises(RuntimeError, match="dropout_p: expected a probability"):
            op(state, 1, 1, 1, 1, dropout_p)
    with pytest.raises(RuntimeError, match="heads_q: expected a size >= 0, but got -1"):
        op(state, 1, -1, 1, 1, 0.5)
