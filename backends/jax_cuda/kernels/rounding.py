"""Sums of products whose bits are the same in every kernel.

Mosaic may contract a product and a sum into one rounding, and where two products meet it is the kernel around them that
decides which: the same expression then differs by its last bit, of a bfloat16 behind it about once in some ten thousand
values. Here all products but one are rounded before they are added, so that one alone is left to be contracted.
"""

from __future__ import annotations

import jax
from jax import lax


def rounded(product: jax.Array) -> jax.Array:
    """The product by itself, in no sum's rounding, as far as LLVM goes: ptxas may still contract what it leaves as a
    product and an addition. So this is for one of two products, where the other takes the addition, and for a sum with
    one product, where there is nothing to choose."""
    found: jax.Array = lax.optimization_barrier(product)  # type: ignore[no-untyped-call]
    return found


def add_scaled(kept: jax.Array, by: jax.Array, added: jax.Array, by_added: jax.Array) -> jax.Array:
    """kept * by + added * by_added; the second product is rounded, the first is contracted with the sum."""
    return kept * by + rounded(added * by_added)


def turned(first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of heads by an angle a pair of dims (RoPE)."""
    return first * cos - rounded(second * sin), add_scaled(second, cos, first, sin)
