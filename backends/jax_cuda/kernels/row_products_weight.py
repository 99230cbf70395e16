"""A weight of a row product: its shape, its order of summation, and how it lies in memory.

Packed, a weight [F, D] is [F/64 * D/64 * 64, 64]: every [64, 64] tile one contiguous run, the tiles of 64 rows with
ascending depth behind each other. In a paired weight the rows i and i + facing of each run of 2 * facing rows face each
other: a pair of tiles holds 64 such rows and then the 64 that they face, so that one block of the grid has both sums.
So a gate meets its up (facing = F / 2), and the two halves of a head that a rotary embedding turns (facing = d / 2).
"""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from mlxcel_jax_cuda.kernels.sizes import TILE

STEP = 128
"""Depth of a ring slot for few tokens: two tiles."""

ENOUGH_UNITS = 96
"""Blocks that share a weight: with fewer, the others stand still for longer than a part costs."""

MOST_PART = 5120
"""Depth of a part: the tokens of eight rows then leave eight slots of a ring beside them."""


@attrs.frozen
class Weight:
    """Rows F, depth D, and two properties of the order of summation. Nothing here may depend on the tokens.

    The depth is cut into `split` equal parts; a part is one chain of products of 64 values into a float32 sum, and the
    parts are added in index order. `facing` pairs rows as the module says; 0 pairs none.
    """

    rows: int
    depth: int
    split: int = 1
    facing: int = 0

    def __attrs_post_init__(self) -> None:
        wrong = misfit(self.rows, self.depth, self.facing)
        if wrong is None and (self.split < 1 or self.depth % (STEP * self.split)):
            wrong = f"its depth must be a multiple of {STEP} x split {self.split}"
        if wrong is not None:
            raise ValueError(f"a weight [{self.rows}, {self.depth}] has no packed form: {wrong}")

    @classmethod
    def of(cls, rows: int, depth: int, *, facing: int = 0) -> Weight:
        """The split by one rule, `split_for`. ValueError for a shape that does not `fits`."""
        return cls(rows, depth, split_for(rows, depth, facing), facing)

    @property
    def pair(self) -> int:
        """Row tiles that one block sums for an item of its work."""
        return 2 if self.facing else 1

    @property
    def items(self) -> int:
        """Row tiles, or pairs of them."""
        return self.rows // (TILE * self.pair)

    @property
    def bytes(self) -> int:
        """Of bf16."""
        return self.rows * self.depth * 2

    @property
    def packed_shape(self) -> tuple[int, int]:
        return self.rows * self.depth // TILE, TILE


@attrs.frozen
class Stacked:
    """Where the tiles of a weight lie in an array that holds several layers, in rows of 64 values: those of layer l
    begin at l * stride + first."""

    first: int
    stride: int

    def holds(self, weight: Weight, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is whole layers, each with room for the weight."""
        room = self.first + weight.packed_shape[0] <= self.stride
        return room and len(shape) == 2 and shape[0] % self.stride == 0 and shape[1] == TILE


def split_for(rows: int, depth: int, facing: int = 0) -> int:
    """Parts of a weight's depth, 1, 2, 4 or 8: the fewest of at most `MOST_PART` that give `ENOUGH_UNITS`, counting a
    pair of row tiles once; or as many as the depth has."""
    items = rows // (TILE * (2 if facing else 1))
    possible = [split for split in (1, 2, 4, 8) if depth % (STEP * split) == 0]
    enough = (split for split in possible if items * split >= ENOUGH_UNITS and depth <= MOST_PART * split)
    return next(enough, possible[-1] if possible else 1)


def misfit(rows: int, depth: int, facing: int = 0) -> str | None:
    """Why a weight [rows, depth] cannot be packed, None if it can."""
    if rows < 1 or rows % (2 * TILE):
        return f"its rows must be a multiple of {2 * TILE}"
    if depth < 1 or depth % STEP:
        return f"its depth must be a multiple of {STEP}"
    if facing < 0 or (facing and (rows % (2 * facing) or (facing % TILE and TILE % facing))):
        return f"facing {facing} must divide its rows into runs of twice as many, and {TILE} or be a multiple of it"
    return None


def fits(rows: int, depth: int, *, facing: int = 0) -> bool:
    """Whether a weight can be packed. One that cannot stays a plain matrix, for XLA."""
    return misfit(rows, depth, facing) is None


def paired_rows(w: Any, weight: Weight) -> Any:
    """w [F, …] in its natural order of rows -> the order of its tiles. NumPy or jax."""
    if not weight.facing:
        return w
    sides = w.reshape(-1, 2, weight.facing, *w.shape[1:]).swapaxes(0, 1)
    return sides.reshape(2, -1, TILE, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)


def natural_rows(w: Any, weight: Weight) -> Any:
    """The inverse of `paired_rows`."""
    if not weight.facing:
        return w
    sides = w.reshape(-1, 2, TILE, *w.shape[1:]).swapaxes(0, 1)
    return sides.reshape(2, -1, weight.facing, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)


def natural_columns(y: jax.Array, weight: Weight) -> jax.Array:
    """y [T, F] with the columns in the order of the tiles -> in that of the family."""
    if not weight.facing:
        return y
    sides = y.reshape(len(y), -1, 2, TILE).swapaxes(1, 2).reshape(len(y), 2, -1, weight.facing)
    return sides.swapaxes(1, 2).reshape(y.shape)


def pack(w: Any, weight: Weight) -> Any:
    """w [F, D], rows as the family has them -> [F/64 * D/64 * 64, 64], same dtype. NumPy or jax."""
    if tuple(w.shape) != (weight.rows, weight.depth):
        raise ValueError(f"w is {tuple(w.shape)}, the weight is [{weight.rows}, {weight.depth}]")
    tiles = paired_rows(w, weight).reshape(weight.rows // TILE, TILE, weight.depth // TILE, TILE)
    return tiles.swapaxes(1, 2).reshape(weight.packed_shape)


def unpack(tiles: Any, weight: Weight) -> Any:
    """The inverse of `pack`."""
    if tuple(tiles.shape) != weight.packed_shape:
        raise ValueError(f"tiles are {tuple(tiles.shape)}, of this weight they are {weight.packed_shape}")
    rows = tiles.reshape(weight.rows // TILE, weight.depth // TILE, TILE, TILE).swapaxes(1, 2)
    return natural_rows(rows.reshape(weight.rows, weight.depth), weight)


def check_tiles(shape: tuple[int, ...], weight: Weight, layer: Any, at: Stacked | None) -> None:
    """ValueError where tiles of this shape are not the weight's, or not of layers that have it."""
    if (layer is None) != (at is None):
        raise ValueError("a layer is told by its number and by where its tiles lie: both, or neither")
    if at is None and shape != weight.packed_shape:
        raise ValueError(f"tiles are {shape}, of this weight they are {weight.packed_shape}")
    if at is not None and not at.holds(weight, shape):
        raise ValueError(f"tiles are {shape}: no layers of {at.stride} rows, with {weight.packed_shape} at {at.first}")


def own_tiles(tiles: jax.Array, weight: Weight, layer: int | None, at: Stacked | None) -> jax.Array:
    """The tiles of a weight among those of several layers, or alone. A copy, for formulas: kernels
    take the whole array."""
    if layer is None or at is None:
        return tiles
    first = layer * at.stride + at.first
    return tiles[first : first + weight.packed_shape[0]]


def product_reference(tiles: jax.Array, x: jax.Array, weight: Weight) -> jax.Array:
    """x [T, D] times a packed weight -> [T, F] float32, rows as the family has them; products and sums in float32."""
    w = unpack(tiles, weight).astype(jnp.float32)
    return jnp.einsum("td,fd->tf", x.astype(jnp.float32), w, precision="highest")


def embedding_rows(tiles: jax.Array, ids: jax.Array, weight: Weight) -> jax.Array:
    """Rows [T, D] of an unpaired packed weight: an embedding that is the head too need not be kept twice. ids [T]."""
    if weight.facing:
        raise ValueError(f"rows of {weight} are paired: an embedding's are not")
    packed = tiles.reshape(weight.rows // TILE, weight.depth // TILE, TILE, TILE)
    return packed[ids // TILE, :, ids % TILE].reshape(-1, weight.depth)
