"""The shape of a persistent decode step: sizes, who does what, and how far the memory warpgroup runs ahead.

Work is spread by arithmetic on the block's number alone. A unit is one part of a row tile (or of a pair of them, where
a weight is paired); a phase's units go to the blocks in turn. The unit of part 0 owns its row tile: it adds the parts.
Owners are the last units of a phase, so that no block waits for a part that comes later in another block's list.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import jax.numpy as jnp
from jax import lax

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.kernels.attention import BLOCK
from mlxcel_jax_cuda.kernels.row_products_weight import STEP, Weight
from mlxcel_jax_cuda.kernels.sizes import SMS, TILE

ROWS = (8, 16, 32)
"""Rows of a step that there can be: the columns of its products."""

FEW = ROWS[0]
"""So many rows have their tokens in shared memory whole. Of more there is room for a piece of the depth at a time."""

PIECE_BYTES = 32 * 1024
"""Of a piece of the tokens of more rows: what registers hold of it at a time, 16 times 16 bytes a thread."""

SLOT_BYTES = STEP * TILE * 2

SUM_BYTES = 1024
"""For sums over the rows of a tile: a register of every thread."""

RING_BYTES = 227 * 1024 - SUM_BYTES - 1024 - 256
"""Shared memory of a block for the ring and the tokens. The rest is the newest key and value, and barriers."""

FEWEST_SLOTS, MOST_SLOTS = 6, 13
MOST_GROUP = 8
"""Heads that share a KV head: the columns of attention's products, however many rows a step has."""

HEAD_DIMS = (64, 128)

LEAVABLE = ("attention", "head", "barriers", "products")


def weight_for(rows: int, depth: int, facing: int = 0) -> Weight:
    return Weight.of(rows, depth, facing=facing)


@attrs.frozen
class Window:
    """Ring slots asked for and not yet here, at most. What has not come makes everything else that goes to memory wait,
    the counters' own messages first; what has come waits in the ring for the end of a phase."""

    wide: int = 3
    narrow: int = 2  # for the first `steps` of a unit: the other warpgroup is likely to be waiting then
    steps: int = 4


@attrs.frozen
class Units:
    """One phase's share of the grid. `shift` is the block that gets the first unit."""

    weight: Weight
    first_row: int  # of the phase's tiles within a layer
    first_tile: int  # of its row tiles among those of a layer that have parts
    shift: int
    sms: int
    tiles: int  # row tiles of a unit, one behind the other in a piece of the depth
    piece: int  # values of a token that are in shared memory at a time; whole pieces are a part

    @property
    def items(self) -> int:
        return self.weight.rows // (TILE * self.tiles)

    @property
    def count(self) -> int:
        return self.items * self.weight.split

    @property
    def pieces(self) -> int:
        return self.part_depth // self.piece

    @property
    def piece_steps(self) -> int:
        """Ring steps of a row tile in a piece."""
        return self.piece // STEP

    @property
    def part_depth(self) -> int:
        return self.weight.depth // self.weight.split

    @property
    def part_steps(self) -> int:
        return self.part_depth // STEP

    @property
    def steps(self) -> int:
        """Ring steps of a unit."""
        return self.part_steps * self.tiles

    def first_of(self, block: Any) -> Any:
        return lax.rem(block + (self.sms - self.shift), jnp.int32(self.sms))

    def count_of(self, block: Any) -> Any:
        """Units of a block."""
        return lax.div(self.count - self.first_of(block) + (self.sms - 1), jnp.int32(self.sms))

    def unit(self, block: Any, n: Any) -> tuple[Any, Any]:
        """(row tile or pair, part) of a block's n-th unit."""
        number, items = self.first_of(block) + n * self.sms, jnp.int32(self.items)
        return lax.rem(number, items), self.weight.split - 1 - lax.div(number, items)

    def row(self, item: Any, part: Any) -> Any:
        """First packed row of a unit within a layer."""
        return self.first_row + item * (self.tiles * self.weight.depth) + part * self.part_depth


@attrs.frozen
class Step:
    """A whole decode step of a standard block, static.

    ValueError where the kernel cannot do it, with the reason.
    """

    layers: int
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    head: Weight
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    pages: int  # of one layer
    page_size: int
    scale: float
    eps: float
    bias: bool = False
    normed: bool = False  # q and k are normed by head
    rows: int = FEW  # N, those that are padding among them
    sms: int = SMS
    window: Window = Window()
    named: int = 0  # so many first ids, of which the head tells the largest logit of each row tile; 0: it does not
    left_out: tuple[str, ...] = ()  # for measuring: what is computed is then undefined
    watched: bool = False  # each block notes where it is, and a wait without an end is given up
    timed: bool = False  # each block notes when it was where

    @classmethod
    def of(
        cls, block: StandardBlock, shapes: Any, *, pages: int, page_size: int, rows: int = FEW, sms: int = SMS
    ) -> Step:
        """Of a model. shapes: its `Shapes`, whose weights say how the parts of their depths are added."""
        return cls(
            block.layers,
            *(shapes.qkv, shapes.o, shapes.gate_up, shapes.down, shapes.unembed),
            heads=block.heads,
            kv_heads=block.kv_heads,
            head_dim=block.head_dim,
            pages=pages,
            page_size=page_size,
            scale=block.scale,
            eps=block.eps,
            bias=block.qkv_bias,
            normed=block.qk_norm,
            rows=rows,
            sms=sms,
        )

    def __attrs_post_init__(self) -> None:
        wrong = self._misfit()
        if wrong is not None:
            raise ValueError(f"no persistent step: {wrong}")

    def _misfit(self) -> str | None:
        D, H, K, d = self.qkv.depth, self.heads, self.kv_heads, self.head_dim
        shapes = {
            "qkv": (self.qkv, (H + 2 * K) * d, D, d // 2),
            "o": (self.o, D, H * d, 0),
            "gate_up": (self.gate_up, self.gate_up.rows, D, self.gate_up.rows // 2),
            "down": (self.down, D, self.gate_up.rows // 2, 0),
            "head": (self.head, self.head.rows, D, 0),
        }
        for name, (weight, *wanted) in shapes.items():
            if [weight.rows, weight.depth, weight.facing] != wanted:
                raise_for = f"rows, depth and facing of {name} are {wanted}"
                return f"{raise_for}, its weight has {[weight.rows, weight.depth, weight.facing]}"
        if d not in HEAD_DIMS:
            return f"heads have {d} dims, the kernel knows {HEAD_DIMS}"
        if H % K or H // K > MOST_GROUP:
            return f"{H} heads of {K} KV heads: up to {MOST_GROUP} heads can share one"
        if K % self.together or (self.group > 1 and self.group % self.together):
            return f"{H} heads of {K} KV heads do not fill tiles of {self.together}, a group a tile"
        if self.normed and self.together != 1:
            return f"heads of {d} dims that are normed share a tile"
        if self.head.split != 1:
            return f"the head is cut into {self.head.split} parts, it must be whole"
        if self.rows not in ROWS:
            return f"rows={self.rows}, the kernel knows {ROWS}"
        if self.page_size != TILE and self.page_size % STEP:
            return f"page_size={self.page_size} must be {TILE} or a multiple of {STEP}"
        if self.layers < 1 or self.pages < 1 or self.sms < 1:
            return f"layers={self.layers}, pages={self.pages} and sms={self.sms} must be 1 or more"
        if self.sms < K:
            return f"{self.sms} multiprocessors are less than one for each of {K} KV heads"
        fewest = max(FEWEST_SLOTS, 2 * BLOCK // STEP * self.chunks)  # a block's keys and values are there together
        if self.slots < fewest:
            return f"tokens of {self.token_depth} values leave {self.slots} ring slots, {fewest} are needed"
        unknown = sorted(set(self.left_out) - set(LEAVABLE))
        if unknown:
            return f"nothing is called {unknown}; {LEAVABLE} can be left out"
        return None

    @property
    def hidden(self) -> int:
        return self.qkv.depth

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def together(self) -> int:
        """Heads of a pair of qkv's row tiles."""
        return 2 * TILE // self.head_dim

    @property
    def chunks(self) -> int:
        """Runs of 64 dims in a head."""
        return self.head_dim // TILE

    @property
    def layer_rows(self) -> int:
        """Packed rows of a layer."""
        return sum(w.rows * w.depth // TILE for w in (self.qkv, self.o, self.gate_up, self.down))

    @property
    def token_depth(self) -> int:
        """Values of a token in shared memory."""
        return max(self.piece_of(w) for w in (self.qkv, self.o, self.gate_up, self.down, self.head))

    def piece_of(self, weight: Weight) -> int:
        """Values of a token that are in shared memory at a time: of few rows those of a part, else a power of two, as
        many of a part's as there is room for in equal pieces."""
        part = weight.depth // weight.split
        if self.rows == FEW:
            return part
        return math.gcd(part, PIECE_BYTES // (2 * self.rows))

    @property
    def token_room(self) -> int:
        """Values of a row of the tokens' buffer. Attention has its weights and its queries there."""
        return max(self.token_depth, BLOCK + self.head_dim)

    @property
    def slots(self) -> int:
        return min((RING_BYTES - self.rows * self.token_room * 2) // SLOT_BYTES, MOST_SLOTS)

    @property
    def copies(self) -> int:
        """Bulk copies that fill a ring slot: keys of a page smaller than a slot come by themselves."""
        return STEP // min(self.page_size, STEP)

    @property
    def product_phases(self) -> dict[str, Units]:
        """The products of a layer. The first blocks have the least of qkv: attention's few items go to them."""
        found: dict[str, Units] = {}
        row, tile = 0, 0
        for name in ("qkv", "o", "gate_up", "down"):
            weight: Weight = getattr(self, name)
            shift = -weight.items * weight.split % self.sms if name == "qkv" else 0
            found[name] = Units(weight, row, tile, shift, self.sms, weight.pair, self.piece_of(weight))
            row += weight.rows * weight.depth // TILE
            tile += weight.rows // TILE if weight.split > 1 else 0
        return found

    @property
    def head_units(self) -> Units:
        """Two row tiles at a time where the tokens come by pieces: half as often."""
        return Units(self.head, 0, 0, 0, self.sms, 1 if self.rows == FEW else 2, self.piece_of(self.head))

    @property
    def split_weights(self) -> list[Weight]:
        return [w for w in (self.qkv, self.o, self.gate_up, self.down) if w.split > 1]

    @property
    def parts(self) -> tuple[int, int]:
        """(parts of other blocks, row tiles that have them), both at least 1."""
        most = max((w.split - 1 for w in self.split_weights), default=1)
        return most, max(sum(w.rows // TILE for w in self.split_weights), 1)

    @property
    def attended(self) -> int:
        """Results of attention in a layer: 64 dims of the heads that share a KV head."""
        return self.rows * self.kv_heads * self.chunks
