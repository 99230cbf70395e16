"""What `persistent_step` computes, from the formulas, by jnp on any device: the yardstick of its checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel_jax_cuda.kernels.persistent_shape import Step
from mlxcel_jax_cuda.kernels.persistent_step import Made, Stacked, Tokens
from mlxcel_jax_cuda.kernels.row_products_weight import Weight, natural_rows, product_reference
from mlxcel_jax_cuda.kernels.sizes import TILE


def tokens_of(
    embedded: jax.Array, gain: jax.Array, turns: tuple[jax.Array, jax.Array], page: jax.Array, place: jax.Array
) -> Tokens:
    """embedded [N, D]; the first norm's gain [D]; cos and sin [d/2, N]; page and place [N]."""
    x = embedded.astype(jnp.float32)
    squares = (x * x).reshape(len(x), -1, TILE)
    while squares.shape[2] > 1:  # in a tree, as `standard_block` does
        squares = squares[..., : squares.shape[2] // 2] + squares[..., squares.shape[2] // 2 :]
    return Tokens(x.T, (x * gain).astype(jnp.bfloat16), squares[..., 0].T, *turns, page, place)


def step_reference(
    step: Step,
    stacked: Stacked,
    tokens: Tokens,
    keys: jax.Array,
    values: jax.Array,
    page_tables: jax.Array,
    seq_lens: jax.Array,
) -> Made:
    """`decode_step` in float32 but for what the kernel keeps in bf16 between its phases."""
    x, scaled, squares = tokens.x, tokens.scaled, tokens.squares
    N, D, d = scaled.shape[0], step.hidden, step.head_dim
    H, K = step.heads, step.kv_heads

    def tiles(name: str, layer: int) -> tuple[Weight, jax.Array]:
        units = step.product_phases[name]
        first = layer * step.layer_rows + units.first_row
        return units.weight, stacked.tiles[first : first + units.weight.packed_shape[0]]

    def inverse_rms(squares: jax.Array) -> jax.Array:
        return lax.rsqrt(squares.sum(axis=0) / D + step.eps)[:, None]

    def turned(heads: jax.Array) -> jax.Array:
        cos, sin = (table[: d // 2].T[:, None] for table in (tokens.cos, tokens.sin))
        first, second = heads[:, :, 0], heads[:, :, 1]
        return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=2)

    def residual(name: str, layer: int, added: jax.Array, gain_row: int) -> None:
        nonlocal x, scaled, squares
        weight, packed = tiles(name, layer)
        x = x + product_reference(packed, added, weight).T
        squares = (x * x).reshape(-1, TILE, N).sum(axis=1)
        scaled = (x * stacked.gains[gain_row][:, None]).T.astype(jnp.bfloat16)

    def attend(queries: jax.Array, layer: int) -> jax.Array:
        """queries [N, H, d] -> [N, H * d]"""
        rows = layer * step.pages + page_tables
        k, v = (jnp.moveaxis(pool[rows], 2, 1).reshape(N, K, -1, d).astype(jnp.float32) for pool in (keys, values))
        grouped = queries.reshape(N, K, H // K, d).astype(jnp.float32)
        scores = jnp.einsum("nkgd,nkpd->nkgp", grouped, k, precision="highest") * step.scale
        visible = (jnp.arange(k.shape[2]) < seq_lens[:, None])[:, None, None]
        weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, -3e38), axis=-1), 0)
        mixed = jnp.einsum("nkgp,nkpd->nkgd", weights, v, precision="highest")
        return mixed.reshape(N, H * d).astype(jnp.bfloat16)

    for layer in range(step.layers):
        weight, packed = tiles("qkv", layer)
        y = product_reference(packed, scaled, weight) * inverse_rms(squares)
        if stacked.bias is not None:
            y = y + natural_rows(stacked.bias[layer], weight)
        heads = y.reshape(N, H + 2 * K, 2, d // 2)
        q, k, v = heads[:, :H], heads[:, H : H + K], heads[:, H + K :]
        if stacked.head_gains is not None:
            q, k = (
                a * lax.rsqrt(jnp.mean(a * a, axis=(2, 3), keepdims=True) + step.eps) * gain
                for a, gain in zip((q, k), stacked.head_gains[layer], strict=True)
            )
        q, k, v = (a.reshape(N, -1, d).astype(jnp.bfloat16) for a in (turned(q), turned(k), v))
        page = jnp.where(tokens.page < 0, len(keys), layer * step.pages + tokens.page)
        keys, values = (pool.at[page, :, tokens.place].set(a, mode="drop") for pool, a in ((keys, k), (values, v)))
        residual("o", layer, attend(q, layer), 2 * layer + 1)
        weight, packed = tiles("gate_up", layer)
        gate, up = jnp.split(product_reference(packed, scaled, weight) * inverse_rms(squares), 2, axis=1)
        hidden = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
        residual("down", layer, hidden, 2 * layer + 2)
    logits = product_reference(stacked.head, scaled, step.head) * inverse_rms(squares)
    found = () if tokens.removed is None else largest(logits, step.named, tokens.removed.ids)
    return Made(logits, x, keys, values, None, found, None)


def largest(logits: jax.Array, named: int, removed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logits [N, V] -> float32 [V/64, N] twice: of each run of 64 ids the largest logit among the first `named` ids but
    those that a row removes (int32 [W, N], -1 for none), inf if any id of the run has one that is no number or inf, and
    the first id that has it, counted within the run."""
    logits, ids = jnp.where(logits < jnp.inf, logits, jnp.inf), jnp.arange(logits.shape[1])
    allowed = (ids < named) & ~(removed.T[:, :, None] == ids).any(axis=1)
    kept = allowed | (logits == jnp.inf)
    runs = jnp.where(kept, logits, -jnp.inf).reshape(len(logits), -1, TILE)
    return runs.max(axis=2).T, runs.argmax(axis=2).T.astype(jnp.float32)
