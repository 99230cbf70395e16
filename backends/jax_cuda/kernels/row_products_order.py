"""In which order a grid takes the items of a product of many tokens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def banded(item: Any, pairs: int, band: int) -> tuple[Any, Any]:
    """(pair of row tiles, token tile) of an item. Token tiles of a band vary fastest: one wave of blocks reads few rows
    of the weight and few tokens."""
    within = lax.rem(item, jnp.int32(pairs * band))
    token = lax.div(item, jnp.int32(pairs * band)) * band + lax.rem(within, jnp.int32(band))
    return lax.div(within, jnp.int32(band)), token
