"""Raw rows of every ggml type, and what they hold according to the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import gguf
import numpy as np

HALVES: Final[Mapping[str, tuple[int, ...]]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block of each quantised type keeps its IEEE halves; every other byte may be anything."""


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal float32 bits everywhere; one NaN is as good as another, for its payload is the processor's choice."""
    if left.shape != right.shape:
        return False
    both_nan = np.isnan(left) & np.isnan(right)
    return bool(((left.view(np.uint32) == right.view(np.uint32)) | both_nan).all())


def reference(raw: np.ndarray, kind: str) -> np.ndarray:
    """The gguf package's values of raw rows [rows, bytes] uint8, as float32 [rows, columns]."""
    with np.errstate(invalid="ignore"):
        values: np.ndarray = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(values, np.float32)


def block_size(kind: str) -> tuple[int, int]:
    """(weights, bytes) of one block according to the gguf package."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def random_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """Rows of the type with every byte of the weights random and finite scales: values no quantiser would choose."""
    rng = np.random.default_rng(5)
    if kind not in HALVES:
        float32 = rng.standard_normal((rows, columns)).astype(np.float32)
        if kind == "BF16":
            return np.ascontiguousarray(float32.view(np.uint16)[:, 1::2]).view(np.uint8)
        return float32.astype({"F32": np.float32, "F16": np.float16}[kind]).view(np.uint8)
    elements, nbytes = block_size(kind)
    raw = rng.integers(0, 256, (rows, columns // elements, nbytes), np.uint8)
    for at in HALVES[kind]:
        raw[..., at : at + 2] = rng.standard_normal((*raw.shape[:2], 1)).astype("<f2").view(np.uint8)
    return raw.reshape(rows, -1)
