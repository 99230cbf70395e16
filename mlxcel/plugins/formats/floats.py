"""Plain floating point of checkpoints, widened to float32. Exact for each of the three."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from mlxcel.core.checkpoint import TensorInfo

Widen = Callable[[np.ndarray, np.ndarray], None]


def from_float32(raw: np.ndarray, out: np.ndarray) -> None:
    """raw [4n] uint8, little-endian; out [n] float32."""
    out[...] = raw.view("<f4")


def from_float16(raw: np.ndarray, out: np.ndarray) -> None:
    """raw [2n] uint8, little-endian IEEE half; out [n] float32."""
    out[...] = raw.view("<f2")


def from_bfloat16(raw: np.ndarray, out: np.ndarray) -> None:
    """raw [2n] uint8, little-endian; out [n] float32. A bfloat16 is the upper half of a float32."""
    np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


FLOATS: Final[Mapping[str, tuple[int, Widen]]] = {
    "F32": (4, from_float32),
    "F16": (2, from_float16),
    "BF16": (2, from_bfloat16),
}
"""The file's name of a type to its bytes an element and its widening."""

BLOCK_ELEMENTS: Final = 1 << 18
"""Elements widened at a time: 1 MiB of float32, so the working memory is that of a block and stays in the cache."""


def checked_out(name: str, shape: tuple[int, ...], out: np.ndarray | None) -> np.ndarray:
    """`out` if float32 [shape] can be written there in place, a new array for None; ValueError for anything else."""
    if out is None:
        return np.empty(shape, np.float32)
    if out.dtype != np.float32 or out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        layout = "" if out.flags.c_contiguous else ", not C-contiguous"
        raise ValueError(
            f"out for {name} must be writable float32 {list(shape)}, got {out.dtype} {list(out.shape)}{layout}"
        )
    return out


def dominant_type(tensors: Mapping[str, TensorInfo]) -> str:
    """The type most weights have, as people call it; "none" without tensors."""
    sizes: Counter[str] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += info.size
    prose = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    name = max(sizes, key=lambda dtype: sizes[dtype], default="none")
    return prose.get(name, name)
