"""What both attention kernels share: the order in which a row's keys are summed, and a plain form of the result.

One order of summation for a token, whether it is decoded or part of a chunk. Keys are cut into blocks of `BLOCK` at
absolute positions. A block gives one partial: the maximum of its scores, the sum of their weights, and the weighted
values. A row's partials are merged in index order, one after the other: with M = max(m, m'),
total = total * 2**(m - M) + total' * 2**(m' - M), and the values alike. A block without a visible key changes nothing.

Scores are kept in base 2. Contraction of a product and a sum is allowed in Mosaic, so that every expression here is
written to have only one that can be contracted (`rounding`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from mlxcel_jax_cuda.kernels.mosaic import plgpu
from mlxcel_jax_cuda.kernels.rounding import add_scaled

BLOCK = 256
"""Keys of a partial."""

SLOT = 128
"""Keys of a ring slot; a block's keys are two slots and its values two more."""

HALF = 64
"""Keys of wgmma's 64 rows."""

FLOOR = -1e30
"""Least maximum of a block, so that a block without a visible key has weights of 0 and not NaN."""

MASKED = -3e38
"""Score of a key that is not visible."""

HEAD_DIMS = (64, 128)

FAST = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True)
"""`approx_math` makes exp2 one instruction. It is part of the bits of both kernels."""


@attrs.frozen
class Scoring:
    """From q.k to a score. softcap 0 and window 0: none."""

    scale: float
    softcap: float = 0.0  # softcap * tanh(score / softcap)
    window: int = 0  # the token at position q sees positions q - window + 1 ... q

    def __attrs_post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale={self.scale} must be finite and above 0")
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ValueError(f"softcap={self.softcap} must be finite, and 0 (none) or above")
        if self.window < 0:
            raise ValueError(f"window={self.window} must be 0 (none) or a number of positions")

    @property
    def factor(self) -> float:
        """What `squash` is to be multiplied with to give a score in base 2."""
        return (self.softcap or self.scale) / math.log(2)

    def squash(self, products: jax.Array) -> jax.Array:
        """tanh of the products under a softcap, as 1 - 2 / (e**2x + 1): exact to float32's last bits beside 1."""
        if not self.softcap:
            return products
        doubled = jnp.exp2(products * (2 * self.scale / self.softcap / math.log(2)))
        return 1.0 - 2.0 / (doubled + 1.0)

    def maximum(self, greatest: jax.Array) -> jax.Array:
        """The block's maximum in base 2, from that of its squashed products."""
        return jnp.maximum(greatest * self.factor, FLOOR)

    def weights(self, squashed: jax.Array, maxima: jax.Array) -> jax.Array:
        return jnp.exp2(squashed * self.factor - maxima)


Partial = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum, sum and weighted values of some blocks, in registers."""


def factors(m: jax.Array, greatest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The merged maximum, and what both sides are multiplied with."""
    merged = jnp.maximum(m, greatest)
    return merged, jnp.exp2(m - merged), jnp.exp2(greatest - merged)


def merge(old: Partial, new: Partial, spread: Callable[[jax.Array], jax.Array]) -> Partial:
    """`spread` repeats a value of each row or column over the weighted values."""
    m, by, by_added = factors(old[0], new[0])
    total = add_scaled(old[1], by, new[1], by_added)
    return m, total, add_scaled(old[2], spread(by), new[2], spread(by_added))


def merge_run(
    old: Partial,
    first: jax.Array,
    used: jax.Array,
    maxima: list[jax.Array],
    sums: list[jax.Array],
    values: list[jax.Array],
    spread: Callable[[jax.Array], jax.Array],
) -> Partial:
    """`old` with the partials `first`, first + 1, … of a row that has `used`, in index order; those behind its last
    change nothing. All maxima come first, so that the chain of factors is short."""
    steps, m = [], old[0]
    for s, greatest in enumerate(maxima):
        here = first + s < used
        m, by, by_added = factors(m, jnp.where(here, greatest, FLOOR))
        steps.append((by, by_added * jnp.where(here, 1.0, 0.0)))
    _, total, acc = old
    for s, (by, by_added) in enumerate(steps):
        total = add_scaled(total, by, sums[s], by_added)
        acc = add_scaled(acc, spread(by), values[s], spread(by_added))
    return m, total, acc


def finish(total: jax.Array, values: jax.Array, spread: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Weighted values over their sum; zeros where nothing was seen."""
    return values / spread(jnp.where(total == 0, 1.0, total))


def start(layout: Any, shape: tuple[int, int], axis: int) -> Partial:
    """The partial of no blocks; `axis` is the values' axis over which the maximum and the sum are repeated."""
    reduced, width = layout.reduce(axis), shape[1 - axis]
    fill = functools.partial(jnp.full, dtype=jnp.float32)
    return (
        plgpu.layout_cast(fill((width,), FLOOR), reduced),
        plgpu.layout_cast(fill((width,), 0.0), reduced),
        plgpu.layout_cast(fill(shape, 0.0), layout),
    )


def check_pages(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
    """q [rows, H, d] and pages [pages, K, page_size, d]. ValueError, with what fits."""
    if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"q is {q.shape}, pages are {k_pages.shape} and {v_pages.shape}: "
            "they must be [rows, H, d] and twice [pages, K, page_size, d]"
        )
    (_, H, d), (_, K, page_size, width) = q.shape, k_pages.shape
    if d != width or d not in HEAD_DIMS:
        raise ValueError(
            f"d is {d} of q and {width} of the pages: both must be 64 or 128; other widths take XLA's form"
        )
    if H % K:
        raise ValueError(f"{H} heads cannot share {K} KV heads: H must be a multiple of K")
    if page_size % SLOT and page_size != HALF:
        raise ValueError(f"page_size={page_size} must be {HALF} or a multiple of {SLOT}: a tile never straddles pages")
    if {q.dtype, k_pages.dtype, v_pages.dtype} != {jnp.dtype(jnp.bfloat16)}:
        raise ValueError(f"q, k and v are {q.dtype}, {k_pages.dtype}, {v_pages.dtype}: all must be bfloat16")


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, key_positions: jax.Array, scoring: Scoring
) -> jax.Array:
    """softmax(q k) v in float32, one row of tokens. q [T, H, d], k and v [K, P, d], positions [T] (-1: sees nothing),
    key_positions [P] (-1: holds nothing). Returns [T, H, d] float32, zeros where nothing is seen."""
    (T, H, d), K = q.shape, k.shape[0]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.einsum("tkgd,kpd->tkgp", q.reshape(T, K, H // K, d), k, precision="highest") * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    behind = positions[:, None] - key_positions
    visible = (behind >= 0) & (key_positions >= 0) & (behind < (scoring.window or jnp.inf))
    visible = visible[:, None, None]
    weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1), 0)
    return jnp.einsum("tkgp,kpd->tkgd", weights, v, precision="highest").reshape(T, H, d)
