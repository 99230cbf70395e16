"""The types of ggml: their numbers and names, and the blocks of those that this reader widens to float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import numpy as np

from mlxcel.plugins.formats.floats import BLOCK_ELEMENTS, FLOATS, Widen
from mlxcel.plugins.formats.gguf_small import (
    BLOCK,
    from_iq4_nl,
    from_q4_0,
    from_q4_1,
    from_q5_0,
    from_q5_1,
    from_q8_0,
)
from mlxcel.plugins.formats.gguf_super import SUPER_BLOCK, from_q2_k, from_q3_k, from_q4_k, from_q5_k, from_q6_k


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
        with np.errstate(invalid="ignore"):  # a scale of infinity or NaN is the file's own and comes through as it is
            for start in range(0, out.size // self.elements, run):
                stop = start + run
                packed = raw[start * self.nbytes : stop * self.nbytes]
                self.widen(packed, out[start * self.elements : stop * self.elements])


_READABLE: Final = (
    *(BlockType(name, 1, nbytes, widen) for name, (nbytes, widen) in FLOATS.items()),
    BlockType("Q4_0", BLOCK, 18, from_q4_0),
    BlockType("Q4_1", BLOCK, 20, from_q4_1),
    BlockType("Q5_0", BLOCK, 22, from_q5_0),
    BlockType("Q5_1", BLOCK, 24, from_q5_1),
    BlockType("Q8_0", BLOCK, 34, from_q8_0),
    BlockType("IQ4_NL", BLOCK, 18, from_iq4_nl),
    BlockType("Q2_K", SUPER_BLOCK, 84, from_q2_k),
    BlockType("Q3_K", SUPER_BLOCK, 110, from_q3_k),
    BlockType("Q4_K", SUPER_BLOCK, 144, from_q4_k),
    BlockType("Q5_K", SUPER_BLOCK, 176, from_q5_k),
    BlockType("Q6_K", SUPER_BLOCK, 210, from_q6_k),
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
