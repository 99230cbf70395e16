"""ggml's "K" formats, super-blocks of 256 weights, back to float32.

A super-block is 16 sub-blocks of 16 weights (Q2_K, Q3_K, Q6_K) or 8 of 32 (Q4_K, Q5_K). `d` and `e` are IEEE halves;
`s` and `m` are small integers for each sub-block; `q` and `h` are the low and the high bits of each weight:

    Q2_K   s and m in nibbles [16], q 2 bits [256], d, e            w = (d s) q - (e m)
    Q3_K   h 1 bit [256], q 2 bits [256], s 6 bits [16], d          w = (d (s - 32)) (q + 4 h - 4)
    Q4_K   d, e, s and m 6 bits [8], q 4 bits [256]                 w = (d s) q - (e m)
    Q5_K   d, e, s and m 6 bits [8], h 1 bit [256], q 4 bits [256]  w = (d s) (q + 16 h) - (e m)
    Q6_K   q 4 bits [256], h 2 bits [256], int8 s[16], d            w = (d s) (q + 16 h - 32)

Products and sums are float32, with the brackets as written. Neighbouring weights lie in neighbouring bytes: 32 bytes of
2 bits hold 128 weights, the lowest bits of all 32 first; 32 bytes of 1 bit hold all 256; 32 bytes of nibbles hold 64,
in Q6_K 64 bytes of them hold 128. Source: ggml's `ggml-common.h` (layout) and `ggml-quants.c` (`dequantize_row_*`).

Each function takes raw [bytes] uint8 and out [256 n] float32, both n whole super-blocks, and writes all of out.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mlxcel.plugins.formats.gguf_bits import halves, unpacked

SUPER_BLOCK: Final = 256


def from_q2_k(raw: np.ndarray, out: np.ndarray) -> None:
    blocks = raw.reshape(-1, 84)
    scales, minima = np.moveaxis(unpacked(blocks[:, :16], 4), 1, 0)
    values = out.reshape(-1, 16, 16)
    values[...] = unpacked(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(values.shape)
    values *= (halves(blocks, 80) * scales)[..., None]
    values -= (halves(blocks, 82) * minima)[..., None]


def from_q3_k(raw: np.ndarray, out: np.ndarray) -> None:
    blocks = raw.reshape(-1, 110)
    quants = unpacked(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, SUPER_BLOCK)
    quants |= unpacked(blocks[:, :32], 1, up=2).reshape(-1, SUPER_BLOCK)
    quants -= 4  # wraps, and is below zero where it is read as int8
    scales = _six_bits(blocks[:, 96:108])
    scales -= 32
    values = out.reshape(-1, 16, 16)
    values[...] = quants.view(np.int8).reshape(values.shape)
    values *= (halves(blocks, 108) * scales.view(np.int8))[..., None]


def from_q4_k(raw: np.ndarray, out: np.ndarray) -> None:
    blocks = raw.reshape(-1, 144)
    values = out.reshape(-1, 8, 32)
    values[...] = unpacked(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(values.shape)
    _scale_and_lower(blocks, values)


def from_q5_k(raw: np.ndarray, out: np.ndarray) -> None:
    blocks = raw.reshape(-1, 176)
    quants = unpacked(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, SUPER_BLOCK)
    quants |= unpacked(blocks[:, 16:48], 1, up=4).reshape(-1, SUPER_BLOCK)
    values = out.reshape(-1, 8, 32)
    values[...] = quants.reshape(values.shape)
    _scale_and_lower(blocks, values)


def from_q6_k(raw: np.ndarray, out: np.ndarray) -> None:
    blocks = raw.reshape(-1, 210)
    quants = unpacked(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, SUPER_BLOCK)
    quants |= unpacked(blocks[:, 128:192].reshape(-1, 2, 32), 2, up=4).reshape(-1, SUPER_BLOCK)
    quants -= 32  # wraps, and is below zero where it is read as int8
    values = out.reshape(-1, 16, 16)
    values[...] = quants.view(np.int8).reshape(values.shape)
    values *= (halves(blocks, 208) * blocks[:, 192:208].view(np.int8))[..., None]


def _scale_and_lower(blocks: np.ndarray, values: np.ndarray) -> None:
    """values [n, 8, 32] times d s, less e m, in place; Q4_K and Q5_K begin alike.

    Three words of four bytes each follow d and e: s 0 to 3, m 0 to 3, and nibbles with s 4 to 7 in the low halves and
    m 4 to 7 in the high ones. The two bits that those lack are at the top of the bytes of the first two words.
    """
    s, m, nibbles = np.ascontiguousarray(blocks[:, 4:16]).view("<u4").T
    words = np.empty((len(blocks), 4), "<u4")
    words[:, 0] = s & 0x3F3F3F3F
    words[:, 1] = nibbles & 0x0F0F0F0F | s >> 2 & 0x30303030
    words[:, 2] = m & 0x3F3F3F3F
    words[:, 3] = nibbles >> 4 & 0x0F0F0F0F | m >> 2 & 0x30303030
    integers = words.view(np.uint8)
    values *= (halves(blocks, 0) * integers[:, :8])[..., None]
    values -= (halves(blocks, 2) * integers[:, 8:])[..., None]


def _six_bits(packed: np.ndarray) -> np.ndarray:
    """packed [n, 12] uint8 to [n, 16] uint8 in 0 to 63: eight bytes with nibbles, then four with the upper bits."""
    integers = unpacked(packed[:, 8:], 2, up=4).reshape(-1, 16)
    integers |= unpacked(packed[:, :8], 4).reshape(-1, 16)
    return integers
