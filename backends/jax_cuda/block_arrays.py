"""The arrays of a standard block: one of each kind for all layers, since a program pays for each that it is given.

A host needs about two microseconds for each array in or out of a program, and with one for each weight a model of
sixteen layers had 163 in a step. Kernels take the whole arrays and the number of a layer; programs cut nothing from
them, for a slice is a copy, or keeps the kernel behind it out of captured graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import attrs
import jax

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, Weight, misfit
from mlxcel_jax_cuda.kernels.sizes import TILE

HEAD_DIMS = (64, 128)

IN_LAYERS = ("qkv", "o", "gate_up", "down")
"""The groups whose tiles lie behind one another, layer by layer in this order."""


class BlockWeights(NamedTuple):
    """Every array of a model, V tokens, L layers and hidden size D."""

    tiles: jax.Array  # [L * R, 64]: packed groups of each layer
    head: jax.Array  # [V * D / 64, 64], packed
    gains: jax.Array  # [2 L + 1, D] float32, offsets added: before attention and before the MLP of each layer, final
    embed: jax.Array | None  # [V, D]; None where the head is the embedding too
    bias: jax.Array | None  # [L, F] float32 of qkv, in the order of its tiles
    head_gains: jax.Array | None  # [L, 2, 2, d/2] float32, offsets added: of q and of k, the halves of a head apart


@attrs.frozen(cache_hash=True)
class Shapes:
    """The packed weights of a block, by group."""

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    unembed: Weight

    @classmethod
    def of(cls, block: StandardBlock) -> Shapes:
        """ValueError with the reason where the block has no fused form; see `refusal`."""
        reason = refusal(block)
        if reason is not None:
            raise ValueError(f"no fused form: {reason}")
        rows = _rows(block)
        qkv, o, gate_up, down = (Weight.of(*rows[group][0], facing=rows[group][1]) for group in IN_LAYERS)
        # The head is whole: a vocabulary has row tiles for every block, and a step ends with it.
        return cls(qkv, o, gate_up, down, Weight(*rows["unembed"][0]))

    @property
    def layer_rows(self) -> int:
        """R, rows of 64 values that the tiles of a layer take."""
        return sum(self[group].packed_shape[0] for group in IN_LAYERS)

    def __getitem__(self, group: str) -> Weight:
        found: Weight = getattr(self, group)
        return found

    def at(self, group: str) -> Stacked:
        """Where the tiles of a group are within those of its layer."""
        before = IN_LAYERS[: IN_LAYERS.index(group)]
        return Stacked(sum(self[other].packed_shape[0] for other in before), self.layer_rows)


def _rows(block: StandardBlock) -> dict[str, tuple[tuple[int, int], int]]:
    """([rows, depth], facing) of each group."""
    D, heads = block.hidden, block.heads * block.head_dim
    return {
        "qkv": ((heads + 2 * block.kv_heads * block.head_dim, D), block.head_dim // 2),
        "o": ((D, heads), 0),
        "gate_up": ((2 * block.ffn, D), block.ffn),
        "down": ((D, block.ffn), 0),
        "unembed": ((block.vocab_size, D), 0),
    }


def refusal(block: StandardBlock) -> str | None:
    """Why a block cannot be run by the kernels, None if it can."""
    together = 2 * TILE // block.head_dim
    if block.activation != "silu":
        return f"its activation is {block.activation}, the kernels know silu"
    if block.head_dim not in HEAD_DIMS:
        return f"its heads have {block.head_dim} dims, the kernels know 64 and 128"
    if len(block.frequencies) * 2 != block.head_dim:
        return f"only {len(block.frequencies) * 2} of {block.head_dim} dims of a head are turned"
    group = block.heads // block.kv_heads
    if block.kv_heads % together or (group > 1 and group % together):
        return f"{block.heads} heads of {block.kv_heads} KV heads do not fill tiles of {together}, a group a tile"
    if block.qk_norm and together != 1:
        return f"heads of {block.head_dim} dims that are normed share a tile"
    for name, (shape, facing) in _rows(block).items():
        reason = misfit(*shape, facing)
        if reason is not None:
            return f"{name} {list(shape)}: {reason}"
    return None


@attrs.frozen(cache_hash=True)
class BlockIndex:
    """The static side of the arrays of a block: which rows are whose. Equal for equal models."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    shapes: Shapes

    @classmethod
    def of(cls, block: StandardBlock) -> BlockIndex:
        return cls(block.layers, block.heads, block.kv_heads, block.head_dim, Shapes.of(block))

    def sizes(self, group: str) -> tuple[int, ...]:
        """Rows of each weight of a group."""
        rows, heads, kv = self.shapes[group].rows, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"qkv": (heads, kv, kv), "gate_up": (rows // 2, rows // 2)}.get(group, (rows,))
