"""ggml's formats of 32 weights a block, back to float32.

`d` is the block's scale and `m` its minimum, both IEEE half; `h` are the fifth bits:

    Q8_0     d, int8 q[32]                 w = d * q
    Q4_0     d, nibbles q[32]              w = d * (q - 8)
    Q4_1     d, m, nibbles q[32]           w = d * q + m
    Q5_0     d, h[32], nibbles q[32]       w = d * (q + 16 h - 16)
    Q5_1     d, m, h[32], nibbles q[32]    w = d * (q + 16 h) + m
    IQ4_NL   d, nibbles q[32]              w = d * LEVELS[q]

Byte i of the nibbles holds weight i in its low half and weight i + 16 in its high half; bit i of the four bytes of h,
read as a little-endian number, belongs to weight i. Products and sums are float32, in this order. Source: ggml's
`ggml-common.h` (layout and the levels) and `ggml-quants.c` (`dequantize_row_*`).

Each function takes raw [bytes] uint8 and out [32 n] float32, both n whole blocks, and writes all of out.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mlxcel.plugins.formats.gguf_bits import halves, unpacked

BLOCK: Final = 32

LEVELS: Final = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    np.float32,
)
LEVELS.setflags(write=False)


def from_q8_0(raw: np.ndarray, out: np.ndarray) -> None:
    blocks, values = raw.reshape(-1, 34), out.reshape(-1, BLOCK)
    values[...] = blocks[:, 2:].view(np.int8)
    values *= halves(blocks, 0)


def from_q4_0(raw: np.ndarray, out: np.ndarray) -> None:
    blocks, values = raw.reshape(-1, 18), out.reshape(-1, BLOCK)
    quants = _nibbles(blocks[:, 2:])
    quants -= 8  # wraps, and is below zero where it is read as int8
    values[...] = quants.view(np.int8)
    values *= halves(blocks, 0)


def from_q4_1(raw: np.ndarray, out: np.ndarray) -> None:
    blocks, values = raw.reshape(-1, 20), out.reshape(-1, BLOCK)
    values[...] = _nibbles(blocks[:, 4:])
    values *= halves(blocks, 0)
    values += halves(blocks, 2)


def from_q5_0(raw: np.ndarray, out: np.ndarray) -> None:
    blocks, values = raw.reshape(-1, 22), out.reshape(-1, BLOCK)
    quants = _nibbles(blocks[:, 6:])
    quants |= _fifth_bits(blocks[:, 2:6])
    quants -= 16  # wraps, and is below zero where it is read as int8
    values[...] = quants.view(np.int8)
    values *= halves(blocks, 0)


def from_q5_1(raw: np.ndarray, out: np.ndarray) -> None:
    blocks, values = raw.reshape(-1, 24), out.reshape(-1, BLOCK)
    quants = _nibbles(blocks[:, 8:])
    quants |= _fifth_bits(blocks[:, 4:8])
    values[...] = quants
    values *= halves(blocks, 0)
    values += halves(blocks, 2)


def from_iq4_nl(raw: np.ndarray, out: np.ndarray) -> None:
    blocks, values = raw.reshape(-1, 18), out.reshape(-1, BLOCK)
    np.take(LEVELS, _nibbles(blocks[:, 2:]), out=values, mode="clip")  # with "raise" it would not write in place
    values *= halves(blocks, 0)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """packed [n, 16] uint8 to [n, 32] uint8 in 0 to 15."""
    return unpacked(packed, 4).reshape(-1, BLOCK)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """packed [n, 4] uint8 to [n, 32] uint8, each 0 or 16."""
    bits = np.unpackbits(packed.reshape(-1), bitorder="little").reshape(-1, BLOCK)
    eight = bits.view(np.uint64)  # NumPy shifts words faster than bytes, and a one does not leave its byte
    eight <<= 4
    return bits
