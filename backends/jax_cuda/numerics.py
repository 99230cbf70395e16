"""How a model is computed: what decides bits and executables, as one static record."""

from __future__ import annotations

from typing import Any

import attrs
import jax.numpy as jnp

from mlxcel.core.backend import Level

TILE = 8
"""Tokens that run together on XLA:CPU, where a row's bits do not depend on its place among so many."""


@attrs.frozen
class Numerics:
    """`dtype` is that of weights, KV and what products take and give; sums, norms, scores and logits are float32."""

    platform: str  # "cpu", "cuda"
    dtype: str
    level: Level
    hopper: int = 0  # SMs of a GPU that runs the kernels, 0 where none does
    formulas: bool = False  # what there are kernels for runs all the same, by their formulas in jnp
    watched: bool = False  # each layer's output is looked at for what is not finite

    @property
    def packed(self) -> bool:
        """Whether weights lie in the kernels' tiles, and standard blocks decode by fused steps."""
        return bool(self.hopper) or self.formulas

    @property
    def tiled(self) -> bool:
        """Whether a launch runs in a loop over tiles of eight tokens (tiles.py)."""
        return self.platform == "cpu"

    @property
    def compute(self) -> Any:
        return jnp.dtype(self.dtype)
