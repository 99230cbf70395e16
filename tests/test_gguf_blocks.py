"""Blocks of ggml widened to float32, against the gguf package: equal bits for every byte that a block can hold."""

from __future__ import annotations

from typing import Final

import gguf
import numpy as np
import pytest
from gguf_rows import HALVES, block_size, random_rows, reference, same_bits

from mlxcel.plugins.formats.floats import BLOCK_ELEMENTS
from mlxcel.plugins.formats.gguf_blocks import READABLE_TYPES

DENSE_TEXT_MODELS: Final = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
ODD_HALVES: Final = {
    "zero": 0x0000,
    "minus zero": 0x8000,
    "smallest denormal": 0x0001,
    "largest denormal": 0x03FF,
    "negative denormal": 0x8155,
    "smallest normal": 0x0400,
    "one": 0x3C00,
    "minus a third": 0xB555,
    "largest": 0x7BFF,
    "most negative": 0xFBFF,
    "infinity": 0x7C00,
    "minus infinity": 0xFC00,
    "quiet NaN": 0x7E01,
    "signalling NaN": 0x7D01,
}


def widened(kind: str, raw: np.ndarray) -> np.ndarray:
    """What the reader makes of raw rows [rows, bytes] uint8: float32 [rows, columns]."""
    elements, nbytes = block_size(kind)
    out = np.full((len(raw), raw.shape[1] // nbytes * elements), -1, np.float32)
    READABLE_TYPES[kind].dequantise(raw.reshape(-1), out.reshape(-1))
    return out


def random_blocks(kind: str, blocks: int, seed: int) -> np.ndarray:
    """[1, bytes] uint8, scales included: about one half in 32 is infinite or NaN."""
    return np.random.default_rng(seed).integers(0, 256, (1, blocks * block_size(kind)[1]), np.uint8)


def test_the_types_of_dense_text_models_are_read() -> None:
    assert set(READABLE_TYPES) == set(DENSE_TEXT_MODELS)


@pytest.mark.parametrize("kind", DENSE_TEXT_MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_equal_the_gguf_package(kind: str, seed: int) -> None:
    raw = random_blocks(kind, 2000, seed)
    assert same_bits(widened(kind, raw), reference(raw, kind))


@pytest.mark.parametrize("name", ODD_HALVES)
@pytest.mark.parametrize("kind", HALVES)
def test_odd_scales_equal_the_gguf_package(kind: str, name: str) -> None:
    """Each half of a block in turn is the odd one; the others stay finite and the weights random."""
    elements, nbytes = block_size(kind)
    for at in HALVES[kind]:
        raw = random_rows(kind, 1, 64 * elements)
        raw.reshape(-1, nbytes)[:, at : at + 2] = np.array([ODD_HALVES[name]], "<u2").view(np.uint8)
        assert same_bits(widened(kind, raw), reference(raw, kind)), at


@pytest.mark.parametrize("background", [0x00, 0xFF])
@pytest.mark.parametrize("kind", HALVES)
def test_every_value_of_every_byte_equals_the_gguf_package(kind: str, background: int) -> None:
    """Each byte beside the halves takes all its values in turn; the others have no bit set, or all of them."""
    _, nbytes = block_size(kind)
    halves = [at + side for at in HALVES[kind] for side in (0, 1)]
    free = [at for at in range(nbytes) if at not in halves]
    raw = np.full((len(free), 256, nbytes), background, np.uint8)
    for row, at in enumerate(free):
        raw[row, :, at] = np.arange(256)
    for at in HALVES[kind]:
        raw[..., at : at + 2] = np.array([-1.25 - at], "<f2").view(np.uint8)
    rows = raw.reshape(len(free), -1)
    assert same_bits(widened(kind, rows), reference(rows, kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_of_the_gguf_packages_quantiser(kind: str) -> None:
    weights = np.random.default_rng(11).standard_normal((40, 512)).astype(np.float32)
    weights[3] = 0
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    values = widened(kind, raw)
    assert same_bits(values, reference(raw, kind))
    assert (values[3] == 0).all()


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("kind", DENSE_TEXT_MODELS)
def test_the_length_of_a_run_does_not_show(kind: str, extra: int) -> None:
    """One block short of a run of the reader, exactly one, and one block more; the rest of the memory stays."""
    elements, nbytes = block_size(kind)
    blocks = BLOCK_ELEMENTS // elements + extra
    pattern = random_rows(kind, 1, 7 * elements).reshape(7, nbytes)
    raw = pattern[np.arange(blocks) % 7].reshape(-1)
    few = widened(kind, pattern.reshape(1, -1)).reshape(7, elements)
    memory = np.full((blocks + 2) * elements, -1, np.float32)
    READABLE_TYPES[kind].dequantise(raw, memory[elements:-elements])
    assert same_bits(memory[elements:-elements].reshape(-1, elements), few[np.arange(blocks) % 7])
    assert (memory[:elements] == -1).all()
    assert (memory[-elements:] == -1).all()


@pytest.mark.parametrize("kind", DENSE_TEXT_MODELS)
def test_raw_bytes_may_begin_anywhere_and_be_read_only(kind: str) -> None:
    raw = random_rows(kind, 1, 2048)
    shifted = np.zeros(raw.size + 1, np.uint8)
    shifted[1:] = raw
    shifted.setflags(write=False)
    out = np.empty(2048, np.float32)
    READABLE_TYPES[kind].dequantise(shifted[1:], out)
    assert same_bits(out, reference(raw, kind)[0])
