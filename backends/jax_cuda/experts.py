"""A mixture of gated MLPs. https://arxiv.org/abs/2101.03961"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.products import row_products

Gate = Callable[[jax.Array, jax.Array], jax.Array]


def choose_experts(logits: jax.Array, top_k: int, renormalise: bool) -> tuple[jax.Array, jax.Array]:
    """logits float32 [T, E] -> experts int32 [T, top_k], best first, ties by index, and their shares."""
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    shares = weights / jnp.sum(weights, axis=-1, keepdims=True)
    best, chosen = lax.top_k(shares, top_k)
    if renormalise:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    return chosen, best


def mixture(
    x: jax.Array,
    router_logits: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    *,
    top_k: int,
    renormalise: bool,
    gated: Gate,
    numerics: Numerics,
) -> jax.Array:
    """x [T, D], weights [E, F, D], [E, F, D] and [E, D, F] -> float32 [T, D].

    Few tokens read the weights of their own experts; of many, each expert sees all, and those that are not its own
    count nothing. At R2 the second form always, experts in their order: a token's sum does not depend on the others'.
    """
    chosen, shares = choose_experts(router_logits, top_k, renormalise)
    if not numerics.tiled and x.shape[0] * top_k <= weights[0].shape[0]:
        return _gathered(x, chosen, shares, weights, gated)

    def add_expert(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        number, gate, up, down = expert
        hidden = gated(row_products(gate, x), row_products(up, x))
        mine = chosen == number
        share = jnp.max(jnp.where(mine, shares, 0), axis=-1, keepdims=True)
        used = jnp.any(mine, axis=-1, keepdims=True)
        return jnp.where(used, total + share * row_products(down, hidden), total), None

    numbers = jnp.arange(weights[0].shape[0])
    total, _ = lax.scan(add_expert, jnp.zeros(x.shape, jnp.float32), (numbers, *weights))
    return total


def _gathered(
    x: jax.Array,
    chosen: jax.Array,
    shares: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    gated: Gate,
) -> jax.Array:
    gates, ups, downs = (each[chosen] for each in weights)
    hidden = gated(*(jnp.einsum("td,tkfd->tkf", x, w, preferred_element_type=jnp.float32) for w in (gates, ups)))
    parts = jnp.einsum("tkf,tkdf->tkd", hidden, downs, preferred_element_type=jnp.float32)
    return jnp.sum(parts * shares[..., None], axis=1)
