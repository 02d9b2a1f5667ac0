"""Real text to train on: the sources of Python's standard library, packed without padding.

Every source file is a document. Documents are laid one after the other in a batch, and a vector of
cumulative lengths (`cu_seqlens`) says where each begins: attention never looks across the border
of two documents, and not one position is spent on padding.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

START = 0  # a byte that no source file contains: it stands before the first byte of a document
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # not the library
LEFT_OUT |= {"encodings", "pydoc_data"}  # tables of data


def read_sources() -> list[bytes]:
    """Returns every source file of the standard library, without its tests and tables of data."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in folder.rglob("*.py")
        if not LEFT_OUT.intersection(path.relative_to(folder).parts)
    )
    sources = [source for path in files if (source := path.read_bytes()) and START not in source]
    if len(sources) < 100:
        raise SystemExit(f"train_gpt: found {len(sources)} source files in {folder}, need 100")
    return sources


def split(sources: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Returns (files to train on, files held out): the same on every call, every 20th held out."""
    shuffled = random.Random(0).sample(sources, len(sources))
    held_out = len(shuffled) // 20
    return shuffled[held_out:], shuffled[:held_out]


@dataclass
class Batch:
    """Documents packed into one stream of `total` bytes."""

    inputs: Tensor  # (total) int64: the byte before each target; START before a document's first
    targets: Tensor  # (total) int64
    positions: Tensor  # (total) int64: position inside the document
    cu_seqlens: Tensor  # (documents + 1) int32: where each document begins, and the end
    lengths: list[int]  # of each document, on the host

    @classmethod
    def pack(cls, documents: list[bytes], device: torch.device) -> Batch:
        lengths = [len(document) for document in documents]
        targets = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8).long()
        positions = torch.cat([torch.arange(length) for length in lengths])
        inputs = targets.roll(1).masked_fill(positions == 0, START)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        tensors = (tensor.to(device) for tensor in (inputs, targets, positions, cu_seqlens))
        return cls(*tensors, lengths)


def batches(
    sources: list[bytes], total: int, context: int, seed: int, device: torch.device
) -> Iterator[Batch]:
    """Yields batches of exactly `total` bytes for ever, in an order that only `seed` decides.

    A file longer than `context` is cut, and each piece is a document of its own; the document
    that meets the end of a batch is cut there.
    """
    pieces = [
        source[begin : begin + context]
        for source in sources
        for begin in range(0, len(source), context)
    ]
    order = random.Random(seed)
    documents: list[bytes] = []
    room = total
    while True:
        for piece in order.sample(pieces, len(pieces)):
            documents.append(piece[:room])
            room -= len(documents[-1])
            if room == 0:
                yield Batch.pack(documents, device)
                documents, room = [], total
