"""A small byte-level GPT over packed documents, with a choice of two attention functions.

Pre-normalised blocks, rotary positions, grouped heads (several query heads share one key/value
head), dropout on the attention weights. All documents of a batch lie in one stream of `total`
positions, so no tensor here has a batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from source_text import Batch
from torch import Tensor, nn

from flashattn_ext import flash_attention_varlen

# (query (total, heads_q, head_dim), key and value (total, heads_kv, head_dim), batch, dropout_p)
# -> (total, heads_q, head_dim)
Attention = Callable[[Tensor, Tensor, Tensor, Batch, float], Tensor]


def attention_ours(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, dropout_p: float
) -> Tensor:
    """One call for all documents: the borders are `cu_seqlens`."""
    borders, longest = batch.cu_seqlens, max(batch.lengths)
    return flash_attention_varlen(
        query, key, value, borders, borders, longest, longest, causal=True, dropout_p=dropout_p
    )


def attention_torch(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, dropout_p: float
) -> Tensor:
    """One call for each document. One call with a block-diagonal mask would be slower: it works
    on all `total * total` pairs, and most of them belong to two different documents."""
    heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    documents = zip(*(tensor.split(batch.lengths, dim=2) for tensor in heads_first), strict=True)
    outputs = [
        nn.functional.scaled_dot_product_attention(
            *query_key_value, is_causal=True, dropout_p=dropout_p, enable_gqa=True
        )
        for query_key_value in documents
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


ATTENTIONS: dict[str, Attention] = {"ours": attention_ours, "torch": attention_torch}


@dataclass
class Shape:
    """The size of a model."""

    width: int
    layers: int
    heads_q: int
    heads_kv: int
    vocabulary: int = 256  # bytes

    @property
    def head_dim(self) -> int:
        return self.width // self.heads_q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turns each pair of features by an angle that grows with
    the position. x (total, heads, head_dim), cos and sin (total, 1, head_dim / 2)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape, attention: Attention, dropout: float):
        super().__init__()
        self.shape, self.attention, self.dropout = shape, attention, dropout
        width, width_kv = shape.width, shape.heads_kv * shape.head_dim
        self.norm_attention = nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, width + 2 * width_kv, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        shape = self.shape  # of the model; x has (total, width)
        heads = self.query_key_value(self.norm_attention(x)).unflatten(-1, (-1, shape.head_dim))
        query, key, value = heads.split([shape.heads_q, shape.heads_kv, shape.heads_kv], dim=1)
        query, key = rotate(query, *turn), rotate(key, *turn)
        dropout_p = self.dropout if self.training else 0.0
        out = self.attention(query, key, value, batch, dropout_p)
        x = x + self.project(out.flatten(1))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Gives the scores of the next byte at each position of a packed batch."""

    def __init__(self, shape: Shape, attention: Attention, dropout: float):
        super().__init__()
        half = shape.head_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attention, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:  # the layers that write to the residual stream begin small
            for layer in (block.project, block.mlp[2]):
                nn.init.normal_(layer.weight, std=0.02 / (2 * shape.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, batch: Batch) -> Tensor:  # (total, vocabulary)
        angles = batch.positions[:, None, None] * self.frequencies  # (total, 1, head_dim / 2)
        turn = angles.cos(), angles.sin()
        x = self.embed(batch.inputs)
        for block in self.blocks:
            x = block(x, turn, batch)
        return self.head(self.norm(x))

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of the next byte, in nats."""
        return nn.functional.cross_entropy(self(batch).float(), batch.targets)

    @torch.inference_mode()
    def sample(self, prompt: bytes, length: int, temperature: float, context: int) -> bytes:
        """Continues `prompt` by `length` bytes. The whole text goes through the model for each
        byte: plain, and quick enough for a few hundred."""
        device = self.embed.weight.device
        text = prompt
        for _ in range(length):
            seen = text[-context:] + b"?"  # its last position is the one to fill
            scores = self(Batch.pack([seen], device))[-1].float() / temperature
            text += bytes([int(torch.multinomial(scores.softmax(-1), 1))])
        return text
