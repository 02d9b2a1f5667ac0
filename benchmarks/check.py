"""Results are held against the formula in fp64 before anything is timed.

The formula runs on the tensors that are timed, for one key/value head (the last) with its query
heads, of one batch entry (the last) or packed sequence (the longest), in blocks of rows. The error
of a result is ||got - exact|| / ||exact||.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext import dropout_mask

LIMITS = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 2e-2}
ROWS = 512


class ExactResults:
    """out and gradients of the part that is checked, in fp64."""

    def __init__(self, case, tensors):
        self.case = case
        self.heads = slice(case.heads_q - case.heads_q // case.heads_kv, case.heads_q)
        longest = max(range(len(case.lengths)), key=case.lengths.__getitem__, default=None)
        start = sum(case.lengths[:longest]) if case.lengths else 0
        self.rows = slice(start, start + case.lengths[longest]) if case.lengths else slice(None)
        # A gradient of the mask is a sum over the batch, the others need one entry of it.
        all_entries = case.mask == "float" and case.trains
        batch = range(case.batch) if all_entries else [case.batch - 1]
        self.results: dict[str, Tensor] = {}
        with torch.no_grad():
            for entry in batch:
                parts = self._entry(tensors, entry)
                if "mask" in self.results:
                    parts["mask"] += self.results["mask"]
                self.results = parts

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """What is checked of a result: (heads, rows, head_dim); of a mask (heads, rows, keys)."""
        if name == "mask":
            return tensor[0, self.heads]
        heads = self.heads if name in ("out", "query", "grad_out") else slice(-1, None)
        if self.case.lengths:
            return tensor[self.rows, heads].transpose(0, 1)
        return tensor[-1, heads]

    def errors(self, results: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: relative_error(self.part(name, results[name].detach()), exact)
            for name, exact in self.results.items()
        }

    def _entry(self, tensors, entry: int) -> dict[str, Tensor]:
        case = self.case
        dense = [getattr(tensors, name) for name in ("query", "key", "value", "grad_out")]
        if not case.lengths:
            dense = [tensor[entry : entry + 1] for tensor in dense]
        names = ("query", "key", "value", "grad_out")
        query, key, value, grad = (
            self.part(name, tensor).double() for name, tensor in zip(names, dense, strict=True)
        )
        scale = case.head_dim**-0.5
        results = {"out": torch.empty_like(query)}
        if case.trains:
            results |= {"query": torch.empty_like(query)}
            results |= {"key": torch.zeros_like(key), "value": torch.zeros_like(value)}
            if case.mask == "float":
                shape = (query.size(0), query.size(1), key.size(1))
                results["mask"] = query.new_empty(shape)
        keep = self._keep(tensors, entry)
        for head in range(query.size(0)):
            for first in range(0, query.size(1), ROWS):
                rows = slice(first, first + ROWS)
                scores = query[head, rows] @ key[0].T * scale
                scores = self._masked(scores, first, tensors, entry, head)
                probs = torch.softmax(scores, -1).nan_to_num(0.0)
                factor = 1.0 if keep is None else keep[head, rows]
                results["out"][head, rows] = (probs * factor) @ value[0]
                if not case.trains:
                    continue
                grad_probs = grad[head, rows] @ value[0].T * factor
                delta = (probs * grad_probs).sum(-1, keepdim=True)
                grad_scores = probs * (grad_probs - delta)
                if case.mask == "float":
                    results["mask"][head, rows] = grad_scores
                results["query"][head, rows] = grad_scores @ key[0] * scale
                results["key"][0] += grad_scores.T @ query[head, rows] * scale
                results["value"][0] += (probs * factor).T @ grad[head, rows]
        return results

    def _masked(self, scores: Tensor, first: int, tensors, entry: int, head: int) -> Tensor:
        case = self.case
        row = torch.arange(first, first + scores.size(0), device=scores.device)[:, None]
        col = torch.arange(scores.size(1), device=scores.device)
        visible = torch.ones_like(scores, dtype=torch.bool)
        if case.causal or case.window:
            visible &= col <= row
        if case.window:
            visible &= col > row - case.window
        if case.key_lengths:
            visible &= col < case.key_lengths[entry]
        if tensors.mask is not None:
            mask = tensors.mask[0, self.heads if tensors.mask.size(1) > 1 else slice(None)]
            mask = mask[head if mask.size(0) > 1 else 0, first : first + scores.size(0)]
            if mask.is_floating_point():
                scores = scores + mask
            else:
                visible &= mask
        return scores.masked_fill(~visible, -torch.inf)

    def _keep(self, tensors, entry: int) -> Tensor | None:
        """Dropout's factor, 0 or 1 / (share that is kept): (heads, rows, keys)."""
        case = self.case
        if tensors.rng_state is None:
            return None
        sizes = (case.batch, case.heads_q, case.len_q, case.len_k)
        kept = dropout_mask(tensors.rng_state, *sizes, case.dropout_p)[entry, self.heads]
        return kept.double() / (round((1 - case.dropout_p) * 65536) / 65536)


def relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()
