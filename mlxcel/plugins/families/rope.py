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
    scaling = keys.within("rope_parameters") or keys.within("rope_scaling")
    base = keys.real("rope_theta", DEFAULT_BASE)
    if scaling is None:
        return Rope(dim, base)
    base = scaling.real("rope_theta", base)
    # Both spellings are in use; a file with neither says nothing about a type.
    name = "rope_type" if scaling.has("rope_type") or not scaling.has("type") else "type"
    if scaling.word(name, KNOWN, default="default") == "default":
        return Rope(dim, base)
    low, high = scaling.real("low_freq_factor"), scaling.real("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    return Rope(
        dim,
        base,
        Llama3Scaling(scaling.real("factor"), low, high, scaling.size("original_max_position_embeddings")),
    )


def rope_from_gguf(keys: ConfigKeys, dim: int, checkpoint: Checkpoint) -> Rope:
    """From GGUF metadata; llama3 scaling is stored as the tensor `rope_freqs.weight`, one divisor a pair."""
    keys.word("rope.scaling.type", ("none",), default="none")
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
