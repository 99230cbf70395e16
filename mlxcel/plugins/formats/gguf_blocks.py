"""Block formats of ggml: their names, their sizes, and back to float32.

A quantised row is a run of blocks of 32 weights. `d` is the block's scale and `m` its minimum, both IEEE half:

    Q8_0   d, int8 q[32]            w = d * q
    Q4_0   d, nibbles q[32]         w = d * (q - 8)
    Q4_1   d, m, nibbles q[32]      w = d * q + m

Byte i of the nibbles holds weight i in its low half and weight i + 16 in its high half. Products and sums are float32,
in this order. Source: ggml's `ggml-common.h` (layout) and `ggml-quants.c` (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import numpy as np

from mlxcel.plugins.formats.floats import BLOCK_ELEMENTS, FLOATS, Widen

BLOCK: Final = 32


def from_q8_0(raw: np.ndarray, out: np.ndarray) -> None:
    """raw [34n] uint8; out [32n] float32."""
    blocks, values = raw.reshape(-1, 34), out.reshape(-1, BLOCK)
    values[...] = blocks[:, 2:].view(np.int8)
    values *= _halves(blocks, 0)


def from_q4_0(raw: np.ndarray, out: np.ndarray) -> None:
    """raw [18n] uint8; out [32n] float32."""
    blocks, values = raw.reshape(-1, 18), out.reshape(-1, BLOCK)
    _nibbles(blocks[:, 2:], values)
    values -= np.float32(8)
    values *= _halves(blocks, 0)


def from_q4_1(raw: np.ndarray, out: np.ndarray) -> None:
    """raw [20n] uint8; out [32n] float32."""
    blocks, values = raw.reshape(-1, 20), out.reshape(-1, BLOCK)
    _nibbles(blocks[:, 4:], values)
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The half at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, values: np.ndarray) -> None:
    """packed [n, 16] uint8 to values [n, 32] float32 in 0 to 15."""
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4


@attrs.frozen
class BlockType:
    """A type this reader knows: `elements` weights take `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int
    widen: Widen

    def dequantise(self, raw: np.ndarray, out: np.ndarray) -> None:
        """raw [bytes] uint8 to out [elements] float32, both whole blocks, a bounded run of blocks at a time."""
        run = BLOCK_ELEMENTS // self.elements
        for start in range(0, out.size // self.elements, run):
            stop = start + run
            self.widen(raw[start * self.nbytes : stop * self.nbytes], out[start * self.elements : stop * self.elements])


_READABLE: Final = (
    *(BlockType(name, 1, nbytes, widen) for name, (nbytes, widen) in FLOATS.items()),
    BlockType("Q4_0", BLOCK, 18, from_q4_0),
    BlockType("Q4_1", BLOCK, 20, from_q4_1),
    BlockType("Q8_0", BLOCK, 34, from_q8_0),
)

TYPE_NAMES: Final = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"),
    *("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"),
    *("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8"),
    *("MXFP4", "NVFP4", "Q1_0"),
)
"""By number: every type ggml has given one, withdrawn ones included, so that a refusal can say the name."""

READABLE_TYPES: Final[Mapping[str, BlockType]] = {kind.name: kind for kind in _READABLE}


def type_name(number: int) -> str:
    """The name of a ggml type number, "type 99" for one that has none."""
    return TYPE_NAMES[number] if number < len(TYPE_NAMES) else f"type {number}"
