"""Visible pairs, floating-point operations and bytes of an attention problem.

Only what must be done is counted: 2 operations for a multiply-add, two matrix products forward and
five backward (scores anew, and the gradients of probabilities, value, query and key), over the
pairs of a query and a key that may see each other. So a rate never profits from work that could
have been left out. Softmax, masks and dropout count nothing.
"""

from __future__ import annotations

PRODUCTS = {"forward": 2, "backward": 5, "training": 7}
KEPT_SCORES = {"forward": 2, "backward": 4, "training": 6}  # naive_attention keeps probabilities
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def visible_pairs(case, mask=None) -> int:
    """Pairs that may see each other, over all batch entries and query heads."""
    if mask is not None and not mask.is_floating_point():
        return int(mask.sum()) * case.batch * case.heads_q
    lengths = case.lengths or case.key_lengths or (case.len_k,) * case.batch
    rows = (lambda length: length) if case.lengths else (lambda length: case.len_q)
    return case.heads_q * sum(
        _pairs_of_sequence(rows(length), length, case.causal, case.window) for length in lengths
    )


def _pairs_of_sequence(len_q: int, len_k: int, causal: bool, window: int) -> int:
    """Row i sees keys i - window + 1 to i (window), or 0 to i (causal), or all; top-left."""
    if not (causal or window):
        return len_q * len_k
    behind = _triangle(len_q, len_k)
    # Keys 0 to i - window are the causal pairs of a problem that begins `window` rows later.
    return behind - _triangle(len_q - window, len_k) if window else behind


def _triangle(len_q: int, len_k: int) -> int:
    """Sum of min(i + 1, len_k) over rows i < len_q."""
    rising = max(0, min(len_q, len_k))
    return rising * (rising + 1) // 2 + max(0, len_q - rising) * len_k


def attention_flops(case, pairs: int) -> int:
    products = KEPT_SCORES if case.op == "naive_attention" else PRODUCTS
    return 2 * products[case.direction] * pairs * case.head_dim


def attention_bytes(case) -> int:
    """Inputs read once and results written once; a mask is read once, its gradient written once."""
    rows_q = case.batch * case.heads_q * case.len_q
    keys = case.key_lengths or (case.len_k,) * case.batch
    rows_k = case.heads_kv * sum(keys)
    size = BYTES[case.dtype]
    forward = (2 * rows_q + 2 * rows_k) * case.head_dim * size + 4 * rows_q
    # Backward reads query, key, value, out, grad_out and lse, and writes three gradients.
    backward = (4 * rows_q + 4 * rows_k) * case.head_dim * size + 4 * rows_q
    mask = case.len_q * case.len_k * {"": 0, "float": case.heads_q * size}.get(case.mask, 1)
    forward += mask
    backward += mask * (2 if case.mask == "float" else 1)
    if case.op == "naive_attention":  # probabilities, written by forward and read by backward
        forward += rows_q * case.len_k * size
        backward += rows_q * case.len_k * size
    return {"forward": forward, "backward": backward, "training": forward + backward}[
        case.direction
    ]
