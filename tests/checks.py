"""Holding an op against the formula: results, gradients, dtypes, strides and exact zeros."""

from __future__ import annotations

import copy
import functools
import itertools

import formula
import torch
from layouts import dense_strides_like, lay_out
from problems import DTYPES, build
from tolerances import accumulator, assert_close, finite, max_error

TENSORS = ("query", "key", "value")
DIFFERENTIABLE = ("attn_mask", "alibi_slopes", "sinks")


def flash_attention(query, key, value, **options):
    import flashattn_ext

    return _results(functools.partial(flashattn_ext.flash_attention, query, key, value, **options))


def flash_attention_varlen(query, key, value, **options):
    import flashattn_ext

    op = flashattn_ext.flash_attention_varlen
    return _results(functools.partial(op, query, key, value, **options))


def _results(call):
    """Results of a call; the largest logits are those of another, which other kernels may make."""
    out, lse = call(return_lse=True)
    with torch.no_grad():
        max_logits = call(return_max_logits=True)[1]
    return formula.Results(out, lse, max_logits, weights=None)


def naive_attention(query, key, value, **options):
    import flashattn_ext

    results = flashattn_ext.naive_attention(
        query, key, value, return_lse=True, return_max_logits=True, return_weights=True, **options
    )
    return formula.Results(*results)


DENSE_OPS = {"flash": flash_attention, "naive": naive_attention}


def formula_for(options):
    if "cu_seqlens_q" not in options:
        return formula.attention

    def packed(query, key, value, *, max_seqlen_q, max_seqlen_k, **others):
        return formula.packed_attention(query, key, value, **others)

    return packed


def on_cpu(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def run(function, tensors, options, upstream=None, dtype=None, wanted=None):
    """Calls `function` and differentiates it: (results, {name: gradient}).

    `upstream`: gradients of out, lse and (where given) weights; None: forward only. `dtype`: what
    the floating tensors are turned into first. `wanted`: names to differentiate by; None: all.
    """
    named = dict(zip(TENSORS, tensors, strict=True)) | options
    leaves = {}
    for name in (*TENSORS, *DIFFERENTIABLE):
        tensor = named.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            leaf = tensor.detach() if dtype is None else tensor.detach().to(dtype)
            if upstream is not None and (wanted is None or name in wanted):
                leaves[name] = leaf.requires_grad_()
            named[name] = leaf
    results = function(**named)
    if upstream is None:
        return results, {}
    outputs = [r for r, g in zip(_differentiable(results), upstream, strict=False) if g is not None]
    upstream = [
        g.to(result.dtype)
        for g, result in zip([g for g in upstream if g is not None], outputs, strict=True)
    ]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    return results, dict(zip(leaves, gradients, strict=True))


def run_formula(tensors, options, upstream=None, leaves=None, **how):
    """`run` of the formula, on leaves of a dtype; what nothing depends on has gradient 0."""
    function = functools.partial(formula_for(options), **how)
    results, gradients = run(function, tensors, options, upstream, leaves)
    named = dict(zip(TENSORS, tensors, strict=True)) | options
    for name, gradient in gradients.items():
        if gradient is None:
            gradients[name] = torch.zeros_like(named[name], dtype=leaves)
    return results, gradients


def _differentiable(results):
    return [results.out, results.lse] + ([results.weights] if results.weights is not None else [])


def random_upstream(tensors, packed, layout="contiguous", weights=False):
    """Upstream gradients for out and lse (and weights), reproducible; that of out in `layout`."""
    query, key, value = tensors
    dtype, generator = query.dtype, torch.Generator().manual_seed(17)

    def normal(shape, kind):
        random = torch.randn(shape, generator=generator, dtype=torch.float64)
        return random.to(device=query.device, dtype=kind)

    rows = query.shape[:-1]
    grad_out = lay_out(normal((*rows, value.shape[-1]), dtype), layout)
    upstream = [grad_out, normal(rows[::-1] if packed else rows, accumulator(dtype))]
    return [*upstream, normal((*rows, key.shape[-2]), dtype)] if weights else upstream


class Twins:
    """What an op is held against: the same call by the formula, as (results, {name: gradient}).

    exact: in fp64. eager: by torch, in the dtype of query.
    """

    def __init__(self, tensors, options, upstream):
        self.tensors = [tensor.detach().cpu() for tensor in tensors]
        self.options = {name: on_cpu(value) for name, value in options.items()}
        self.upstream = None if upstream is None else [on_cpu(g) for g in upstream]
        self.dtype = tensors[0].dtype
        self.exact = self._call(self.upstream, leaves=torch.float64)
        self.eager = self._eager(self.upstream, self.exact)

    def _call(self, upstream=None, **how):
        return run_formula(self.tensors, self.options, upstream, **how)

    def _eager(self, upstream, exact):
        if self.dtype == torch.float64:
            return exact[0], _rounded(exact[1], self.tensors, self.options)
        eager = self._call(upstream, dtype=self.dtype)
        if self.dtype == torch.float32:
            return eager
        if not _finite_like(eager, exact):  # 16-bit scores have left the range: keep them in fp32
            results, gradients = self._call(upstream, dtype=torch.float32, stored=self.dtype)
            weights = None if results.weights is None else results.weights.to(self.dtype)
            results = results._replace(out=results.out.to(self.dtype), weights=weights)
            eager = results, _rounded(gradients, self.tensors, self.options)
        accumulated = self._call(dtype=torch.float32)[0]
        lse, max_logits = accumulated.lse, accumulated.max_logits
        return eager[0]._replace(lse=lse, max_logits=max_logits), eager[1]

    @functools.cached_property
    def magnitudes(self):
        """{name: for each element of the gradient, the sum of the magnitudes of its terms}."""
        return self._call(self.upstream, leaves=torch.float64, magnitudes=True)[1]

    @functools.cached_property
    def eager_errors(self):
        """{name: largest error of the eager gradient over some upstream gradients}.

        One draw says little about a gradient of few numbers: its error may be 0 by luck.
        """
        errors = {}
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            signs = [
                g if g is None else g * (torch.rand(g.shape, generator=generator) - 0.5).sign()
                for g in self.upstream
            ]
            exact = self._call(signs, leaves=torch.float64)
            eager = self._eager(signs, exact)
            for name, gradient in exact[1].items():
                error = max_error(finite(eager[1][name]), finite(gradient))
                errors[name] = max(error, errors.get(name, 0.0))
        return errors

    @functools.cached_property
    def orders(self):
        """Results of the eager formula with the columns of query and key in some other orders.

        The exact result is the same, the dot products are rounded in another way: one order says
        little about the error of another where large scores make much of it.
        """
        query, key, value = self.tensors
        results = []
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(query.shape[-1], generator=generator)
            twin = copy.copy(self)
            twin.tensors = [query[..., order], key[..., order], value]
            twin.options = dict(self.options)
            if twin.options.get("scale") is None:
                twin.options["scale"] = query.shape[-1] ** -0.5
            results.append(twin._eager(None, self.exact)[0])
        return results

    def second_look_at_results(self, name):
        """The same for a result: (the largest eager error over some orders, magnitude)."""
        exact = finite(getattr(self.exact[0], name).detach().double())
        errors = [
            max_error(finite(getattr(results, name).detach()), exact) for results in self.orders
        ]
        return max(errors), max_error(exact, torch.zeros(()))

    def second_look(self, name):
        """What decides about a gradient that fails at first: (eager error, magnitude)."""
        return self.eager_errors[name], max_error(finite(self.magnitudes[name]), torch.zeros(()))


def _rounded(gradients, tensors, options):
    inputs = dict(zip(TENSORS, tensors, strict=True)) | options
    return {name: gradient.to(inputs[name].dtype) for name, gradient in gradients.items()}


def _finite_like(eager, exact):
    def pairs():
        yield from zip(_differentiable(eager[0]), _differentiable(exact[0]), strict=True)
        yield from ((eager[1][name], exact[1][name]) for name in exact[1])

    return all(torch.equal(torch.isfinite(a), torch.isfinite(b)) for a, b in pairs())


def assert_matches(got, twin, tensors, options):
    """(results, gradients) of an op against those of the formula."""
    dtype = tensors[0].dtype
    results, gradients = got
    assert results.out.dtype == dtype
    assert results.lse.dtype == accumulator(dtype)
    sizes = results.out.shape
    assert results.out.stride() == dense_strides_like(tensors[0], sizes), "strides of out"
    for name in ("out", "lse", "weights"):
        result = getattr(results, name)
        if result is not None:
            exact, eager = (getattr(run[0], name) for run in (twin.exact, twin.eager))
            second_look = functools.partial(twin.second_look_at_results, name)
            assert_close(name, result, exact, eager, dtype, second_look)
    if results.max_logits is not None:
        assert results.max_logits.dtype == torch.float32
        exact, eager = (run[0].max_logits.float() for run in (twin.exact, twin.eager))
        assert_close("max_logits", results.max_logits, exact, eager, torch.float32)
    inputs = dict(zip(TENSORS, tensors, strict=True)) | options
    for name, gradient in gradients.items():
        given = inputs[name]
        assert gradient is not None, f"grad of {name}: none"
        assert gradient.dtype == given.dtype, f"grad of {name}: {gradient.dtype}"
        exact, eager = (run[1][name] for run in (twin.exact, twin.eager))
        second_look = functools.partial(twin.second_look, name)
        assert_close(f"grad of {name}", gradient, exact, eager, dtype, second_look)
        strides = dense_strides_like(given if name in TENSORS else gradient, gradient.shape)
        assert gradient.stride() == strides, f"strides of the gradient of {name}"
    assert_exact_zeros(got, options)


def assert_exact_zeros(got, options):
    """Rows and keys that take no part give exactly 0, not merely little."""
    results, gradients = got
    unused = results.lse.detach() == -float("inf")
    unused = unused.transpose(0, 1) if "cu_seqlens_q" in options else unused
    rows = {"out": results.out.detach(), "grad of query": gradients.get("query")}
    for name, tensor in rows.items():
        if tensor is not None:
            assert not tensor[unused].count_nonzero(), f"{name}: not 0 in a row without keys"
    for name in ("key", "value"):
        gradient = gradients.get(name)
        if gradient is None:
            continue
        if "cu_seqlens_k" in options:
            hidden = gradient[gap_rows(options, "k", gradient.shape[0])]
        elif options.get("key_lengths") is not None:
            position = torch.arange(gradient.shape[2], device=gradient.device)
            past = position >= options["key_lengths"].unsqueeze(1)
            hidden = gradient.transpose(1, 2)[past]
        else:
            continue
        assert not hidden.count_nonzero(), f"grad of {name}: not 0 past the keys in use"


def gap_rows(options, side, total):
    """bool (total): rows of a packed tensor that belong to no sequence, or to its unused part."""
    begins = options[f"cu_seqlens_{side}"].tolist()
    used = options.get(f"seqused_{side}")
    gap = torch.ones(total, dtype=torch.bool)
    for n, (begin, end) in enumerate(itertools.pairwise(begins)):
        gap[begin : end if used is None else begin + int(used[n])] = False
    return gap


def check_call(op, tensors, options, *, layout="contiguous", backward=True, weights=False):
    """Runs an op forward and backward on given tensors and holds it against the formula."""
    upstream = None
    if backward:
        upstream = random_upstream(tensors, "cu_seqlens_q" in options, layout, weights)
    twin = Twins(tensors, options, upstream)
    got = run(op, tensors, options, upstream)
    assert_matches(got, twin, tensors, options)
    return got


def check(op, problem, device, *, backward=True, weights=False, seed=None):
    """Builds a problem, runs the op on it both ways, and holds it against the formula."""
    tensors, options = build(problem, device, seed)
    assert tensors[0].dtype == DTYPES[problem.dtype]
    layout = problem.layout
    return check_call(op, tensors, options, layout=layout, backward=backward, weights=weights)
