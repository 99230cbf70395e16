"""How a rope is stretched beyond the positions that a model first learnt.

Arithmetic is float32, step by step in the order of the code that the models were trained with: at position 9000 one
unit in the last place of a frequency is half a milliradian, and better digits than the model has seen are wrong digits.
"""

from __future__ import annotations

import math
from typing import Protocol

import attrs
import numpy as np

MOST_DIVISOR = 1e6
"""What a pair may be divided by, far beyond any model: times the largest base it is in float32."""


class Scaling(Protocol):
    """A stretch of the rope. n = dim / 2."""

    def frequencies(self, base: float, dim: int, context: int) -> np.ndarray:
        """float32 [n], radians a position, where no row is longer than `context` positions."""
        ...

    def window(self, max_positions: int) -> int:
        """Positions the model may be run with, where its config says `max_positions`."""
        ...


def periods(base: float, dim: int) -> np.ndarray:
    """base ** (2i / dim), float32 [n]: positions for a radian of pair i. https://arxiv.org/abs/2104.09864

    The power alone is taken in float64 and rounded once: float32 powers differ from one machine to the next.
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


@attrs.frozen
class Linear:
    """Positions divided by `factor`. https://arxiv.org/abs/2306.15595"""

    factor: float
    original_context: int

    def frequencies(self, base: float, dim: int, context: int) -> np.ndarray:
        return 1 / periods(base, dim) / np.float32(self.factor)

    def window(self, max_positions: int) -> int:
        return max(max_positions, int(self.original_context * self.factor))


@attrs.frozen
class Dynamic:
    """A larger base for rows beyond the original context ("NTK-aware"). https://arxiv.org/abs/2309.00071, 3.3

    The formula has the row's length L in it: base * (factor * L / original - factor + 1) ** (dim / (dim - 2)). Here L
    is original * factor for every row, a constant of the checkpoint, and rows within the original context are plain.
    """

    factor: float
    original_context: int

    def frequencies(self, base: float, dim: int, context: int) -> np.ndarray:
        if context > self.original_context:
            base = self.stretched_base(base, dim)
        return 1 / periods(base, dim)

    def stretched_base(self, base: float, dim: int) -> float:
        """That of long rows, for `dim` above 2."""
        stretch: float = (self.factor * self.factor - (self.factor - 1)) ** (dim / (dim - 2))
        return base * stretch

    def window(self, max_positions: int) -> int:
        return max(max_positions, int(self.original_context * self.factor))


@attrs.frozen
class LongRope:
    """Searched divisors, pair by pair: `short` where no row is longer than the original context, else `long`.
    https://arxiv.org/abs/2402.13753"""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int

    def frequencies(self, base: float, dim: int, context: int) -> np.ndarray:
        return _divided(base, dim, self.long if context > self.original_context else self.short)

    def window(self, max_positions: int) -> int:
        return max_positions


@attrs.frozen
class Llama3Scaling:
    """Long waves are divided by `factor`, short ones kept, those between mixed. https://arxiv.org/abs/2407.21783"""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def frequencies(self, base: float, dim: int, context: int) -> np.ndarray:
        plain = 1 / periods(base, dim)
        waves = 1 / plain * np.float32(2 * math.pi)
        low, factor = np.float32(self.low_freq_factor), np.float32(self.factor)
        width = np.float32(self.high_freq_factor - self.low_freq_factor)
        kept = (1 / waves * np.float32(self.original_context) - low) / width
        mixed = (1 - kept) * plain / factor + kept * plain
        long = waves > np.float32(self.original_context / self.low_freq_factor)
        short = waves < np.float32(self.original_context / self.high_freq_factor)
        return np.where(long, plain / factor, np.where(short, plain, mixed))

    def window(self, max_positions: int) -> int:
        return max_positions


@attrs.frozen
class PairDivisors:
    """Every pair divided by its own number, whatever the context: how GGUF keeps a scaling that it has no keys for."""

    divisors: tuple[float, ...]

    def frequencies(self, base: float, dim: int, context: int) -> np.ndarray:
        return _divided(base, dim, self.divisors)

    def window(self, max_positions: int) -> int:
        return max_positions


def _divided(base: float, dim: int, divisors: tuple[float, ...]) -> np.ndarray:
    frequencies: np.ndarray = 1 / (np.array(divisors, np.float32) * periods(base, dim))
    return frequencies
