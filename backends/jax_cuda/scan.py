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
    nothing; padding rows write nowhere. Rows run one after the other: each is the same program in any company.
    """
    rows, width = fields.positions.shape
    inputs = tuple(values.reshape(rows, width, *values.shape[1:]) for values in inputs)

    def row(args: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        slot, copy, positions, *values = args
        slot = jnp.minimum(slot, leaves[0].shape[1] - 1)
        state = tuple(
            jnp.where(positions[0] == 0, jnp.zeros_like(leaf[copy, slot]), leaf[copy, slot]) for leaf in leaves
        )

        def token(state: tuple[jax.Array, ...], at: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
            position, *mine = at
            new, y = step(state, tuple(mine))
            kept = tuple(
                jnp.where(position >= 0, value.astype(jnp.float32), old) for value, old in zip(new, state, strict=True)
            )
            return kept, y

        return lax.scan(token, state, (positions, *values))

    states, outputs = lax.map(row, (fields.slots, fields.state_reads, fields.positions, *inputs))
    changed = [
        leaf.at[fields.state_writes, fields.slots].set(state, mode="drop")
        for leaf, state in zip(leaves, states, strict=True)
    ]
    return changed, outputs.reshape(rows * width, *outputs.shape[2:])
