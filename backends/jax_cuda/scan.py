"""Recurrences along the rows of a launch, one token after the other. https://arxiv.org/abs/2405.21060"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel.core.family import ScanStep
from mlxcel_jax_cuda.launch import Fields


def scan_rows(
    step: ScanStep, inputs: tuple[jax.Array, ...], leaves: Sequence[jax.Array], fields: Fields
) -> tuple[list[jax.Array], jax.Array]:
    """inputs [T, …] and a layer's state leaves [2, slots, …] -> the leaves as the rows leave them, and y [T, …].

    A row reads the copy `state_reads` of its slot, zeros at position 0, and writes `state_writes`. Padding tokens move
    nothing; padding rows write nowhere. Rows run one after the other, each the same program in any company, and finds
    what those before it wrote.
    """
    rows, width = fields.positions.shape
    inputs = tuple(values.reshape(rows, width, *values.shape[1:]) for values in inputs)

    def token(state: tuple[jax.Array, ...], at: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        position, *mine = at
        new, y = step(state, tuple(mine))
        kept = tuple(
            jnp.where(position >= 0, value.astype(jnp.float32), old) for value, old in zip(new, state, strict=True)
        )
        return kept, y

    def row(leaves: tuple[jax.Array, ...], args: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        slot, read, written, positions, *values = args
        place = jnp.minimum(slot, leaves[0].shape[1] - 1)
        state = tuple(jnp.where(positions[0] == 0, 0, leaf[read, place]) for leaf in leaves)
        state, y = lax.scan(token, state, (positions, *values))
        kept = (leaf.at[written, slot].set(new, mode="drop") for leaf, new in zip(leaves, state, strict=True))
        return tuple(kept), y

    turns = (fields.slots, fields.state_reads, fields.state_writes, fields.positions, *inputs)
    changed, outputs = lax.scan(row, tuple(leaves), turns)
    return list(changed), outputs.reshape(rows * width, *outputs.shape[2:])
