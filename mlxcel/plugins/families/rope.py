"""Rotary frequencies from a checkpoint's config. https://arxiv.org/abs/2104.09864

Position p turns pair i by p * frequency_i radians. float32 product and sine, as the models were trained with.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import ConfigKeys

DEFAULT_BASE = 10000.0
"""rope_theta where a config has none: what the first models used and every reader assumes."""

KNOWN = ("default", "llama3")


@attrs.frozen
class Llama3Scaling:
    """Llama 3.1's stretch of the low frequencies. https://arxiv.org/abs/2407.21783"""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """Long waves are divided by `factor`, short ones kept, those between mixed. float64 [d/2] in and out."""
        turns = self.original_context * frequencies / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(smooth, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@attrs.frozen
class Rope:
    """How positions turn the first `dim` dims of a head, in halves. `divisors`, if given, divide pair by pair."""

    dim: int
    base: float = DEFAULT_BASE
    scaling: Llama3Scaling | None = None
    divisors: tuple[float, ...] = ()

    def frequencies(self) -> np.ndarray:
        """float32 [dim / 2], radians a position."""
        plain = 1.0 / self.base ** (np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.divisors:
            plain = plain / np.array(self.divisors)
        if self.scaling is not None:
            plain = self.scaling.apply(plain)
        return plain.astype(np.float32)


def rope_from_hf(keys: ConfigKeys, dim: int) -> Rope:
    """From config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` that holds both."""
    base = keys.real("rope_theta", DEFAULT_BASE)
    found = [(name, inner) for name in ("rope_parameters", "rope_scaling") if (inner := keys.within(name)) is not None]
    for inner in (keys, *(inner for _, inner in found)):
        if inner.real("partial_rotary_factor", 1.0) != 1:
            raise inner.wrong("partial_rotary_factor", "1: turning a part of a head is not supported")
    if not found:
        return Rope(dim, base)
    scalings = [_scaling(inner) for _, inner in found]
    if scalings[0] != scalings[-1]:
        raise CheckpointError(
            f"config.json: {found[0][0]} and {found[-1][0]} scale differently", hint="remove the one that is wrong"
        )
    return Rope(dim, found[0][1].real("rope_theta", base), scalings[0])


def _scaling(keys: ConfigKeys) -> Llama3Scaling | None:
    """Of one mapping. Both spellings of the type are in use; without a type there is nothing to scale by."""
    name = "rope_type" if keys.has("rope_type") or not keys.has("type") else "type"
    if not keys.has(name) and keys.real("factor", 1.0) != 1:
        raise keys.wrong("factor", "1 or left out where no rope_type says what it does")
    if keys.word(name, KNOWN, default="default") == "default":
        return None
    low, high = keys.real("low_freq_factor"), keys.real("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    return Llama3Scaling(keys.real("factor"), low, high, keys.size("original_max_position_embeddings"))


def rope_from_gguf(keys: ConfigKeys, dim: int, checkpoint: Checkpoint) -> Rope:
    """From GGUF metadata; llama3 scaling is stored as the tensor `rope_freqs.weight`, one divisor a pair."""
    keys.word("rope.scaling.type", ("none",), default="none")
    for name in ("rope.scaling.factor", "rope.scale_linear"):  # the second is the first's older spelling
        if not keys.has("rope.scaling.type") and keys.real(name, 1.0) != 1:
            raise keys.wrong(name, "1: linear scaling is not supported")
    base = keys.real("rope.freq_base", DEFAULT_BASE)
    if "rope_freqs.weight" not in checkpoint.tensors:
        return Rope(dim, base)
    info = checkpoint.tensors["rope_freqs.weight"]
    if info.shape != (dim // 2,):
        raise CheckpointError(f"rope_freqs.weight is {list(info.shape)}, the rotary dimension {dim} needs [{dim // 2}]")
    divisors = checkpoint.read("rope_freqs.weight")
    if not np.all(np.isfinite(divisors)) or not np.all(divisors > 0):
        raise CheckpointError("rope_freqs.weight must hold finite numbers above 0")
    return Rope(dim, base, divisors=tuple(float(value) for value in divisors))
