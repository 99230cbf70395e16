"""Which experts a token goes to. https://arxiv.org/abs/2101.03961"""

from __future__ import annotations

import numpy as np


def choose_experts(logits: np.ndarray, top_k: int, renormalise: bool) -> tuple[np.ndarray, np.ndarray]:
    """logits float32 [T, E], C-contiguous -> experts int [T, top_k], best first, ties by index, and their shares."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares = weights / np.add.reduce(weights, axis=-1, keepdims=True)
    chosen = np.argsort(-shares, axis=-1, kind="stable")[:, :top_k]
    best = np.take_along_axis(shares, chosen, axis=-1)
    if renormalise:
        best = best / np.add.reduce(best, axis=-1, keepdims=True)
    return chosen, best
