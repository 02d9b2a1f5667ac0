"""Attention problems as named data, for tests and benchmarks alike."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib

import torch
from layouts import lay_out

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call. Dense, or packed when `lengths` is given."""

    dtype: str = "fp32"
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    len_q: int = 17
    len_k: int = 33
    head_dim: int = 32
    head_dim_v: int = 32
    causal: bool = False
    window: tuple | None = None
    alignment: str | None = None
    mask: str | None = (
        None  # bool, float, fp32, finfo_min, or each + "_rows": some rows see nothing
    )
    mask_shape: str = "bhqk"  # a dimension left out has size 1; "qk", "k": fewer dimensions
    key_lengths: tuple | None = None  # (batch), as shares of len_k in percent
    lengths: tuple | None = None  # packed: ((len_q, len_k), ...)
    gap: int = 0  # packed: unused rows behind every sequence (seqused), and behind the last one
    index: str = "int32"
    softcap: float = 0.0
    alibi: str | None = None  # "heads" or "batch"
    sinks: str | None = None  # a dtype
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "contiguous"

    @property
    def name(self):
        """What differs from the defaults, in short."""
        parts = [self.dtype]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "dtype" and value != field.default:
                text = str(value).replace(" ", "").replace("'", "")
                parts.append(field.name if value is True else f"{field.name}={text}")
        return "-".join(parts)

    @property
    def packed(self):
        return self.lengths is not None

    def seed(self):
        return zlib.crc32(self.name.encode())


def _random(shape, dtype, generator, spread=1.0):
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


MASK_SHAPES = (
    "bhqk",
    "b11k",
    "1hqk",
    "11qk",
    "bh1k",
    "111k",
    "bhq1",
    "hqk",
    "1qk",
    "qk",
    "q1",
    "k",
    "1",
)


def mask_sizes(problem):
    sizes = {
        "b": problem.batch,
        "h": problem.heads_q,
        "q": problem.len_q,
        "k": problem.len_k,
        "1": 1,
    }
    return [sizes[letter] for letter in problem.mask_shape]


def _mask(problem, generator):
    kind, _, rows = problem.mask.partition("_rows")
    rows = problem.mask.endswith("_rows")
    sizes = mask_sizes(problem)
    keep = torch.rand(sizes, generator=generator) < 0.7
    if rows and len(sizes) > 1 and sizes[-2] > 1:
        keep[..., :: max(1, sizes[-2] // 3), :] = False
    if kind == "bool":
        return keep
    dtype = torch.float32 if kind == "fp32" else DTYPES[problem.dtype]
    floor = torch.finfo(dtype).min if kind == "finfo_min" else -float("inf")
    return _random(sizes, dtype, generator).masked_fill(~keep, floor)


def build(problem, device="cpu", seed=None):
    """The tensors of a problem: (query, key, value) and the keyword arguments of the call.

    Packed problems have cu_seqlens_* and max_seqlen_* among the keywords.
    """
    generator = torch.Generator().manual_seed(problem.seed() if seed is None else seed)
    dtype, index = DTYPES[problem.dtype], getattr(torch, problem.index)
    kwargs = {}
    if problem.packed:
        lens = torch.tensor(problem.lengths, dtype=torch.int64).reshape(-1, 2)
        ends = torch.cat([torch.zeros(1, 2, dtype=torch.int64), (lens + problem.gap).cumsum(0)])
        total_q, total_k = ends[-1].tolist()
        total_q, total_k = total_q + problem.gap, total_k + problem.gap
        most = lens.amax(0).tolist() if len(lens) else [0, 0]
        kwargs["cu_seqlens_q"] = ends[:, 0].to(index)
        kwargs["cu_seqlens_k"] = ends[:, 1].to(index)
        kwargs["max_seqlen_q"], kwargs["max_seqlen_k"] = (n + problem.gap for n in most)
        if problem.gap:
            kwargs["seqused_q"], kwargs["seqused_k"] = lens[:, 0].to(index), lens[:, 1].to(index)
        batch, shapes = len(lens), [(total_q, problem.heads_q), *2 * [(total_k, problem.heads_kv)]]
    else:
        batch = problem.batch
        shapes = [
            (batch, problem.heads_q, problem.len_q),
            *2 * [(batch, problem.heads_kv, problem.len_k)],
        ]
    dims = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    inputs = [
        _random((*shape, dim), dtype, generator) for shape, dim in zip(shapes, dims, strict=True)
    ]

    if problem.mask is not None:
        kwargs["attn_mask"] = _mask(problem, generator)
    if problem.key_lengths is not None:
        used = [share * problem.len_k // 100 for share in problem.key_lengths[:batch]]
        kwargs["key_lengths"] = torch.tensor(used, dtype=index)
    if problem.alibi is not None:
        shape = (problem.heads_q,) if problem.alibi == "heads" else (batch, problem.heads_q)
        kwargs["alibi_slopes"] = torch.rand(shape, generator=generator) * 0.3
    if problem.sinks is not None:
        kwargs["sinks"] = _random((problem.heads_q,), DTYPES[problem.sinks], generator)
    if problem.dropout_p > 0:
        state = torch.randint(2**62, (2,), generator=generator) - 2**61
        kwargs["rng_state"], kwargs["dropout_p"] = state, problem.dropout_p
    for option in ("causal", "window", "alignment", "softcap", "scale"):
        value = getattr(problem, option)
        if value != getattr(Problem, option):
            kwargs[option] = value

    inputs = [lay_out(tensor.to(device), problem.layout) for tensor in inputs]
    for option, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            kwargs[option] = value.to(device)
    if "attn_mask" in kwargs:
        kwargs["attn_mask"] = lay_out(kwargs["attn_mask"], problem.layout)
    return inputs, kwargs


# ---- choosing problems ---------------------------------------------------------------------------


def pairwise(factors, seed=0, tries=10):
    """Few combinations in which every pair of values of two factors occurs.

    `factors`: {field: values}. Greedy: of some random completions of a pair that is still missing,
    the one with most missing pairs is taken.
    """
    rng = random.Random(seed)
    names = list(factors)
    missing = dict.fromkeys(
        ((a, va), (b, vb))
        for a, b in itertools.combinations(names, 2)
        for va in factors[a]
        for vb in factors[b]
    )

    def new_pairs(choice):
        found = itertools.combinations([(name, choice[name]) for name in names], 2)
        return [pair for pair in found if pair in missing]

    while missing:
        wanted = dict(next(iter(missing)))
        candidates = [
            {name: wanted.get(name, rng.choice(factors[name])) for name in names}
            for _ in range(tries)
        ]
        best = max(candidates, key=lambda choice: len(new_pairs(choice)))
        for pair in new_pairs(best):
            del missing[pair]
        yield best


def _valid(choice):
    """Completes a combination, so that the call it describes is allowed."""
    choice = dict(choice)
    heads = choice.pop("heads", None)
    if heads is not None:
        choice["heads_q"], choice["heads_kv"] = heads
    if "visible" in choice:
        choice.update(VISIBLE[choice.pop("visible")])
    dense = choice.get("lengths") is None
    if choice.get("mask") is None:
        choice.pop("mask_shape", None)
    needs_alignment = choice.get("causal") or choice.get("window") or choice.get("alibi")
    if dense and needs_alignment and choice.get("alignment") is None:
        choice["alignment"] = "top_left"
    problem = Problem(**choice)
    if dense:
        per_sequence = problem.heads_q * problem.len_q * problem.len_k
        per_sequence *= problem.head_dim + problem.head_dim_v
        batch = max(1, min(problem.batch, MOST_WORK // max(1, per_sequence)))
        problem = dataclasses.replace(problem, batch=batch)
        if problem.key_lengths is not None:
            problem = dataclasses.replace(problem, key_lengths=problem.key_lengths[:batch])
    return problem


MOST_WORK = 20_000_000  # multiplications a product, so that thousands of problems run in minutes


VISIBLE = {
    "full": {},
    "causal_top_left": {"causal": True, "alignment": "top_left"},
    "causal_bottom_right": {"causal": True, "alignment": "bottom_right"},
    "window_both": {"window": (5, 3), "alignment": "bottom_right"},
    "window_left": {"window": (17, None), "alignment": "top_left"},
    "window_right": {"window": (None, 9), "alignment": "top_left"},
    "window_wide": {"window": (64, 64), "alignment": "top_left"},
    "diagonal": {"window": (0, 0), "alignment": "bottom_right"},
    "causal_window": {"causal": True, "window": (20, 100), "alignment": "bottom_right"},
}
HEAD_DIMS = (1, 3, 8, 33, 64, 80, 96, 128, 192, 256, 320, 512)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200)

DENSE_FACTORS = {
    "dtype": tuple(DTYPES),
    "batch": (1, 2, 3),
    "heads": ((1, 1), (2, 2), (4, 2), (3, 1), (6, 2)),
    "len_q": LENGTHS,
    "len_k": LENGTHS,
    "head_dim": HEAD_DIMS,
    "head_dim_v": HEAD_DIMS,
    "visible": tuple(VISIBLE),
    "mask": (None, None, "bool", "float", "fp32", "bool_rows", "float_rows", "finfo_min_rows"),
    "mask_shape": MASK_SHAPES,
    "key_lengths": (None, None, (100, 50, 30), (0, 100, 77), (3, 0, 100)),
    "softcap": (0.0, 0.0, 1.5, 30.0),
    "alibi": (None, None, "heads", "batch"),
    "sinks": (None, None, "fp16", "bf16", "fp32", "fp64"),
    "dropout_p": (0.0, 0.0, 0.2, 0.9),
    "scale": (None, None, 0.0, -0.3, 1.0),
    "layout": ("contiguous", "blhd", "lbhd", "bhdl", "sliced", "strided", "offset_by_one"),
    "index": ("int32", "int64"),
}
PACKED_LENGTHS = (
    ((5, 7),),
    ((1, 1), (64, 64), (17, 17)),
    ((1, 65), (1, 3), (1, 129)),
    ((33, 4), (0, 9), (12, 0), (15, 16)),
    ((0, 0), (63, 128), (65, 31)),
    ((129, 200), (3, 130)),
    ((0, 5), (0, 0)),
)
PACKED_FACTORS = {
    "dtype": tuple(DTYPES),
    "heads": ((1, 1), (2, 2), (4, 2), (3, 1), (6, 2)),
    "lengths": PACKED_LENGTHS,
    "gap": (0, 0, 2, 13),
    "head_dim": HEAD_DIMS,
    "head_dim_v": HEAD_DIMS,
    "visible": tuple(VISIBLE),
    "softcap": (0.0, 0.0, 1.5, 30.0),
    "alibi": (None, None, "heads", "batch"),
    "sinks": (None, None, "fp16", "bf16", "fp32", "fp64"),
    "dropout_p": (0.0, 0.0, 0.2, 0.9),
    "scale": (None, None, 0.0, -0.3, 1.0),
    "layout": ("contiguous", "blhd", "lbhd", "bhdl", "sliced", "strided", "offset_by_one"),
    "index": ("int32", "int64"),
}


def selection(factors, seeds=(0,)):
    """Named problems: pairwise combinations, one set per seed, each problem once."""
    chosen = {}
    for seed in seeds:
        for choice in pairwise(factors, seed):
            problem = _valid(choice)
            chosen[problem.name] = problem
    return list(chosen.values())


def random_problem(rng):
    """Any problem: `rng` is a random.Random."""
    packed = rng.random() < 0.35
    factors = PACKED_FACTORS if packed else DENSE_FACTORS
    choice = {name: rng.choice(values) for name, values in factors.items()}
    choice["head_dim"], choice["head_dim_v"] = (
        rng.choice([rng.randint(1, 80), rng.choice(HEAD_DIMS)]) for _ in range(2)
    )
    if packed:
        count = rng.randint(0, 5)
        choice["lengths"] = tuple((rng.randint(0, 90), rng.randint(0, 90)) for _ in range(count))
    else:
        choice["len_q"], choice["len_k"] = (rng.randint(0, 140) for _ in range(2))
    problem = _valid(choice)
    reach = [rng.choice([None, 0, rng.randint(0, 60)]) for _ in range(2)]
    if problem.window is not None:
        problem = dataclasses.replace(problem, window=tuple(reach))
    return problem
