"""The named sets of problems, by device. `tiny` gives problems of the same kinds for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from benchmarks.attention import Attention
from benchmarks.softmax import Softmax

# Documents of a text corpus, in tokens: few long ones hold most of them. 4096 together.
DOCUMENTS = (2013, 31, 702, 118, 457, 9, 766)
TRAINED = ("forward", "backward")

# Seconds that a suite may take.
BUDGETS = {
    "cpu": {"softmax": 60, "naive": 60, "forward": 420, "backward": 460, "options": 240,
            "accuracy": 60},
    "cuda": {"softmax": 55, "naive": 55, "forward": 55, "backward": 55, "options": 110,
             "accuracy": 20, "decode": 20},
}  # fmt: skip


def suite(name: str, device: str, tiny: bool = False) -> list[Attention | Softmax]:
    """The problems of a suite, smaller ones first."""
    return list(SUITES[device][name](tiny))


def by_size(cases: Iterable[Attention]) -> list[Attention]:
    def operations(case: Attention) -> int:
        pairs = sum(n * n for n in case.lengths) or case.batch * case.len_q * case.len_k
        return case.heads_q * pairs * case.head_dim

    return sorted(cases, key=operations)


# ---- CPU -----------------------------------------------------------------------------------------


def cpu_softmax(tiny: bool) -> Iterable[Softmax]:
    total = 2**10 if tiny else 2**22
    lengths = (8, 64) if tiny else (32, 512, 4096, 65536)
    for direction, dtype, length in itertools.product(TRAINED, ("fp32", "bf16"), lengths):
        yield Softmax("softmax", direction, dtype, (total // length, length), 1)
        yield Softmax("softmax", direction, dtype, (length, total // length), 0)


def cpu_grid(direction: str, tiny: bool) -> list[Attention]:
    """fp32 and bf16, full and causal, head dims, lengths, and one, a few and many heads."""
    head_dims = (16,) if tiny else (64, 128)
    lengths = (8, 24) if tiny else (128, 512, 1024, 4096)
    heads = (1, 2) if tiny else (1, 8, 32)
    cases = [
        Attention(direction, direction, dtype, 1, h, h, length, length, d, causal=causal)
        for dtype, d, length, h, causal in itertools.product(
            ("fp32", "bf16"), head_dims, lengths, heads, (False, True)
        )
    ]
    if direction == "forward":  # one query row, as in decoding
        keys = (24,) if tiny else (512, 4096)
        cases += [
            Attention(direction, direction, dtype, 1, h, h, 1, length, d)
            for dtype, d, length, h in itertools.product(("fp32", "bf16"), head_dims, keys, heads)
        ]
    return by_size(cases)


def cpu_options(tiny: bool) -> list[Attention]:
    length, d_values = (32, (16,)) if tiny else (1024, (64, 128))
    batch, heads = (4, 2) if tiny else (4, 4)
    documents = (100, 28) if tiny else DOCUMENTS
    total = sum(documents)
    window = length // 4
    cases = []
    for dtype, d in itertools.product(("fp32", "bf16"), d_values):
        shape = (dtype, batch, heads, heads, length, length, d)
        for direction in TRAINED:
            start = ("options", direction)
            packed = ("options", direction, dtype, 1, heads, heads, total, total, d)
            cases += [
                Attention(*start, *shape),
                Attention(*start, *shape, causal=True),
                Attention(*start, *shape, window=window),
                Attention(*packed, lengths=documents),
                Attention(*packed, lengths=documents, causal=True),
            ]
        cases += [
            Attention("options", "training", *shape, dropout_p=0.1),
            Attention("options", "training", *shape, mask="float"),
            Attention("options", "forward", *shape, mask="random bool"),
            Attention("options", "forward", *shape, key_lengths=key_lengths(batch, length)),
        ]
    return by_size(cases)


def cpu_naive(tiny: bool) -> list[Attention]:
    lengths = (16,) if tiny else (256, 1024)
    return naive_grid(lengths, tokens=32 if tiny else 1024, hidden=32 if tiny else 512, dims=(64,))


def accuracy(tiny: bool) -> list[Attention]:
    """Gradients of bf16 inputs, with torch's math path beside."""
    lengths = (16,) if tiny else (128, 512, 1024)
    head_dims = (16,) if tiny else (64, 128)
    return by_size(
        Attention("accuracy", "training", "bf16", 1, 4, 4, length, length, d, causal=causal)
        for length, d, causal in itertools.product(lengths, head_dims, (False, True))
    )


# ---- Both ----------------------------------------------------------------------------------------


def key_lengths(batch: int, length: int) -> tuple[int, ...]:
    """From a half of the keys to all of them."""
    return tuple(length - length * i // (2 * batch) for i in range(batch))


def naive_grid(lengths, tokens: int, hidden: int, dims) -> list[Attention]:
    return by_size(
        Attention(
            "naive", direction, dtype, max(1, tokens // length), max(1, hidden // d),
            max(1, hidden // d), length, length, d, op="naive_attention", causal=causal,
        )
        for direction, dtype, d, length, causal in itertools.product(
            TRAINED, ("fp32", "bf16"), dims, lengths, (False, True)
        )
    )  # fmt: skip


# ---- CUDA: batch * length tokens, hidden = heads * head_dim --------------------------------------


def cuda_softmax(tiny: bool) -> Iterable[Softmax]:
    total = 2**14 if tiny else 2**28
    lengths = (32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 50257, 65536, 131072, 2**18)
    columns = ((2**12, 1024, 64), (2**8, 256, 4096))
    if tiny:
        lengths, columns = (32, 1000), ((4, 16, 8),)
    shapes = [((total // length, length), 1) for length in lengths]
    shapes += [((4, total // 4), 1), *((shape, 1) for shape in columns)]
    for direction, dtype, (shape, dim) in itertools.product(
        TRAINED, ("fp32", "bf16", "fp16"), shapes
    ):
        yield Softmax("softmax", direction, dtype, shape, dim)


def cuda_naive(tiny: bool) -> list[Attention]:
    if tiny:
        return naive_grid((16,), tokens=32, hidden=64, dims=(16,))
    return naive_grid((512, 1024, 2048, 4096), tokens=8192, hidden=2048, dims=(64, 128))


def cuda_grid(direction: str, tiny: bool) -> list[Attention]:
    tokens, hidden = (64, 64) if tiny else (16384, 2048)
    lengths = (32,) if tiny else (512, 2048, 8192, 16384)
    head_dims = (16,) if tiny else (64, 128, 256)
    return by_size(
        Attention(
            direction, direction, "bf16", tokens // length, hidden // d, hidden // d, length,
            length, d, causal=causal,
        )
        for d, length, causal in itertools.product(head_dims, lengths, (False, True))
    )  # fmt: skip


def cuda_options(tiny: bool) -> list[Attention]:
    short, long, d = (32, 64, 16) if tiny else (2048, 8192, 128)
    tokens, heads = (128, 4) if tiny else (16384, 16)
    documents = (100, 28) if tiny else (*DOCUMENTS * 2, *(2 * n for n in DOCUMENTS))
    batch = tokens // short
    cases, masked = [], []
    for direction in TRAINED:

        def case(length: int, dtype="bf16", d=d, kv_heads=0, direction=direction, **options):
            h = heads * 128 // d if not tiny else heads
            shape = (tokens // length, h, kv_heads or h, length, length, d)
            return Attention("options", direction, dtype, *shape, **options)

        h, n = heads, sum(documents)
        packed = ("options", direction, "bf16", 1, h, h, n, n, d)
        cases += [
            case(short),
            case(short, causal=True),
            case(short, dropout_p=0.1),
            case(short, causal=True, dropout_p=0.1),
            Attention(*packed, lengths=documents),
            Attention(*packed, lengths=documents, causal=True),
            grouped_heads(direction, long, tokens, tiny),
            case(long, window=short // 2),
            case(short, key_lengths=key_lengths(batch, short)),
            *(case(short, "fp32", d=x) for x in ((16,) if tiny else (64, 128))),
            *(case(short, "fp32", d=x, causal=True) for x in ((16,) if tiny else (64, 128))),
        ]
        masked += [
            case(short, mask="random bool"),
            case(long, mask="document bool"),
            case(short, mask="float"),
        ]
    # FlexAttention is compiled for these, which takes long: they come last.
    return by_size(cases) + by_size(masked)


def grouped_heads(direction: str, length: int, tokens: int, tiny: bool) -> Attention:
    heads_q, heads_kv, d = (4, 2, 16) if tiny else (32, 8, 128)
    shape = (tokens // length, heads_q, heads_kv, length, length, d)
    return Attention("options", direction, "bf16", *shape, causal=True)


def cuda_decode(tiny: bool) -> list[Attention]:
    """One query row against many keys: bound by reading them."""
    keys = (64,) if tiny else (4096, 32768)
    d = 16 if tiny else 128
    return by_size(
        Attention("decode", "forward", "bf16", batch, heads_q, heads_kv, 1, length, d)
        for length, batch, (heads_q, heads_kv) in itertools.product(
            keys, (1, 8), ((32, 8), (16, 16))
        )
    )


SUITES = {
    "cpu": {
        "softmax": cpu_softmax,
        "naive": cpu_naive,
        "forward": lambda tiny: cpu_grid("forward", tiny),
        "backward": lambda tiny: cpu_grid("backward", tiny),
        "options": cpu_options,
        "accuracy": accuracy,
    },
    "cuda": {
        "softmax": cuda_softmax,
        "naive": cuda_naive,
        "forward": lambda tiny: cuda_grid("forward", tiny),
        "backward": lambda tiny: cuda_grid("backward", tiny),
        "options": cuda_options,
        "decode": cuda_decode,
        "accuracy": accuracy,
    },
}
