"""Weights that a tensor's name and shape alone decide, the same bits on every machine and NumPy.

The reference vectors of the families were made from them, so the recipe may never change: sha256 of the name keys a
Philox-4x64-10 counter generator (Salmon et al. 2011), whose raw words NumPy promises to keep, and the upper 24 bits of
a word are an exact float32 in [-1, 1). One product and one sum, both float32, follow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np

MATRIX_GAIN = 1.5
"""Standard deviation of a row's product with unit values: scores spread by about 2, so attention is not uniform."""
HEAD_GAIN = 1.0
"""The same for the embedding and the head, so that logits are of order 1."""
NORM_SPREAD = 0.25
BIAS_SPREAD = 0.25


def uniform(name: str, count: int) -> np.ndarray:
    """[count] float32 in [-1, 1), multiples of 2**-23."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(count)
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


def seeded_tensor(name: str, shape: tuple[int, ...], *, norm_centre: float = 1.0) -> np.ndarray:
    """float32 of `shape`. Norm weights lie around `norm_centre`, biases around 0, matrices by their inputs' number."""
    values = uniform(name, math.prod(shape)).reshape(shape)
    if len(shape) == 1:
        is_bias = name.endswith("bias")
        spread, centre = (BIAS_SPREAD, 0.0) if is_bias else (NORM_SPREAD, norm_centre)
        return values * np.float32(spread) + np.float32(centre)
    gain = HEAD_GAIN if "embed_tokens" in name or "lm_head" in name else MATRIX_GAIN
    return values * np.float32(gain * math.sqrt(3 / math.prod(shape[1:])))


def seeded_tensors(shapes: Mapping[str, tuple[int, ...]], *, norm_centre: float = 1.0) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint by name."""
    return {name: seeded_tensor(name, shape, norm_centre=norm_centre) for name, shape in shapes.items()}
