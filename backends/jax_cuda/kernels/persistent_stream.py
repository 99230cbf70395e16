"""The memory warpgroup of the persistent step: weight tiles and old KV into one ring, in the order of their use.

It never waits for another block. What it reads nobody writes during the step, but for the newest token's keys and
values: whoever uses those reads them again (`persistent_attention`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.attention import BLOCK
from mlxcel_jax_cuda.kernels.attention_schedule import FIELDS, Tables
from mlxcel_jax_cuda.kernels.mosaic import plgpu
from mlxcel_jax_cuda.kernels.persistent_shape import Step, Window
from mlxcel_jax_cuda.kernels.persistent_watch import Watch
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import TILE

Carry = tuple[Any, Any]
"""Ring steps that have been asked for, and those known to have arrived."""


@attrs.frozen
class Work:
    """A block's share of the decode attention of a step: the same in every layer.

    A block has one KV head, and of the schedule's items some that follow one another: mostly of one row, whose queries
    it then looks for once. Blocks that are left over when each KV head has equally many have none.
    """

    step: Step
    block: Any
    work: Any  # [items, FIELDS + tiles] int32, see `attention_schedule`
    rows: Any  # [N, 2] int32
    tables: Any  # int32, the tables `at` a place of it
    at: Tables

    @property
    def used(self) -> Any:
        """Items of the schedule that there are."""
        last = self.rows.shape[0] - 1
        return self.rows[last, 0] + self.rows[last, 1]

    @property
    def zero(self) -> Any:
        """0, but not for the compiler: a loop of so many turns more stays rolled, and is not peeled."""
        return jnp.minimum(self.used, 0)

    @property
    def _sharing(self) -> int:
        """Blocks that share the items of a KV head."""
        return self.step.sms // self.step.kv_heads

    @property
    def _rank(self) -> Any:
        """Of the block among those: who merges one row's partials is the last to have an item more."""
        sharing = self._sharing
        of_head = lax.div(self.block, jnp.int32(self.step.kv_heads))
        return lax.rem(of_head + -self.step.chunks % sharing, jnp.int32(sharing))

    @property
    def items(self) -> Any:
        if "attention" in self.step.left_out:
            return jnp.int32(0)
        sharing = self._sharing
        count = lax.div(self.used - self._rank + (sharing - 1), jnp.int32(sharing))
        return jnp.where(self.block < sharing * self.step.kv_heads, count, 0)

    def place(self, n: Any) -> tuple[Any, Any]:
        """(item, KV head)."""
        sharing, rank = jnp.int32(self._sharing), self._rank
        first = rank * lax.div(self.used, sharing) + jnp.minimum(rank, lax.rem(self.used, sharing))
        return first + n, lax.rem(self.block, jnp.int32(self.step.kv_heads))

    def page(self, row: Any, number: Any) -> Any:
        """The n-th page of a row, which is no page behind what the row has; numbers end with the table."""
        return self.tables[self.at.place(row, jnp.minimum(number, self.at.pages - 1))]

    def record(self, n: Any, fields: int) -> tuple[Any, ...]:
        """row, first key, blocks, keys of the row, pool row of each tile. To be read one item ahead of its use."""
        item = jnp.minimum(self.place(n)[0], self.work.shape[0] - 1)
        return tuple(self.work[item, i] for i in range(fields))


@attrs.frozen
class Ring:
    """Slots of [STEP, 64] bf16, with a barrier each for "filled" and "read"."""

    slots: Any
    full: Any
    empty: Any

    @property
    def count(self) -> int:
        return int(self.slots.shape[0])

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.count))


def fill(step: Step, ring: Ring, tiles: Any, head: Any, keys: Any, values: Any, work: Work, watch: Watch) -> None:
    """All a block reads in a step. tiles [L * R, 64], head [V * D / 64, 64], keys and values [L * pages, K, page_size,
    d], all in device memory.

    Written for few instructions: each kind of copy stands here once, for those of the other warpgroup need the room.
    """
    window, copies, block, zero = step.window, step.copies, work.block, work.zero
    tile, phases = min(step.page_size, STEP), step.product_phases
    by_pieces = any(units.tiles > 1 and units.pieces > 1 for units in phases.values())

    def ask(carry: Carry, under_way: Any, start: Callable[[Any, Any], None]) -> Carry:
        number, here = carry
        slot = ring.slot(number)

        plgpu.barrier_wait(ring.empty.at[slot])
        for _ in range(window.wide - window.narrow + 1):  # no loop: the compiler would unroll it, at each place

            def has_come(earlier: Any = here) -> None:
                plgpu.barrier_wait(ring.full.at[ring.slot(earlier)])

            late = here < number + 1 - under_way
            pl.when(late)(has_come)
            here = here + late.astype(jnp.int32)
        start(slot, ring.full.at[slot])
        return number + 1, here

    def steps(source: Any, count: Any, row_of: Callable[[Any], Any], window: Window, carry: Carry) -> Carry:
        def fetch(k: Any, carry: Carry) -> Carry:
            row = row_of(k)

            def start(slot: Any, full: Any) -> None:
                for _ in range(copies - 1):
                    plgpu.barrier_arrive(full)  # it waits for as many as keys come in
                plgpu.copy_gmem_to_smem(source.at[pl.ds(pl.multiple_of(row, TILE), STEP)], ring.slots.at[slot], full)

            return ask(carry, jnp.where(k < window.steps, window.narrow, window.wide), start)

        asked: Carry = lax.fori_loop(0, count, fetch, carry)
        return asked

    items, first_record = work.items, work.record(jnp.int32(0), FIELDS + BLOCK // tile)
    tiles_of_block, of_side = BLOCK // tile, BLOCK // STEP * step.chunks  # of_side: slots of a block's keys, or values
    page_rows = jnp.int32(step.kv_heads * step.page_size)

    def attention(layer: Any, count: Any, carry: Carry) -> Carry:
        def item(n: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            number, here, row, first, run, length, *pool_rows = carry
            kv_head, upcoming = work.place(n)[1], work.record(n + 1, len(first_record))

            def pool_row(key: Any) -> Any:
                page = work.page(row, lax.div(key, jnp.int32(step.page_size)))
                return jnp.where(key < length, page * page_rows + lax.rem(key, jnp.int32(step.page_size)), 0)

            def block_of_keys(b: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                number, here, *pool_rows = carry
                following = [pool_row(first + (b + 1) * BLOCK + i * tile) for i in range(tiles_of_block)]

                def one(i: Any, asked: Carry) -> Carry:
                    of_values, place = i >= of_side, lax.rem(i, jnp.int32(of_side))
                    run_of_keys, chunk = lax.div(place, jnp.int32(step.chunks)), lax.rem(place, jnp.int32(step.chunks))

                    dims = pl.ds(pl.multiple_of(chunk * TILE, TILE), TILE)

                    def start(slot: Any, full: Any) -> None:
                        for piece in range(copies):
                            at = jnp.where(run_of_keys == 0, pool_rows[piece], pool_rows[copies + piece])
                            page = layer * step.pages + lax.div(at, page_rows)
                            offset = pl.multiple_of(lax.rem(at, jnp.int32(step.page_size)), TILE)
                            to = ring.slots.at[slot, pl.ds(piece * tile, tile)]
                            for source, wanted in ((keys, jnp.logical_not(of_values)), (values, of_values)):
                                old = source.at[page, kv_head, pl.ds(offset, tile), dims]
                                pl.when(wanted)(functools.partial(plgpu.copy_gmem_to_smem, old, to, full))

                    return ask(asked, window.wide, start)

                asked = lax.fori_loop(0, 2 * of_side + zero, one, (number, here))
                return *asked, *following

            asked = lax.fori_loop(0, run, block_of_keys, (number, here, *pool_rows))[:2]
            return *asked, *upcoming

        asked: Carry = lax.fori_loop(0, count, item, (*carry, *first_record))[:2]
        return asked

    def choose(which: Any, of_phase: Callable[[str], Any]) -> Any:
        """`of_phase` of the phase of that number."""
        first, *others = [of_phase(name) for name in phases]
        for i, other in enumerate(others):
            first = jnp.where(which == i + 1, other, first)
        return first

    def layer(n: Any, carry: Carry) -> Carry:
        def phase(which: Any, carry: Carry) -> Carry:
            def unit(i: Any, carry: Carry) -> Carry:
                begin = n * step.layer_rows + choose(which, lambda name: phases[name].row(*phases[name].unit(block, i)))
                turn = choose(
                    which, lambda name: phases[name].piece_steps if phases[name].tiles > 1 else phases[name].steps
                )
                depth = choose(which, lambda name: phases[name].weight.depth)
                jump = choose(which, lambda name: phases[name].weight.depth - phases[name].part_depth)

                def row_of(k: Any) -> Any:
                    if by_pieces:
                        return begin + of_pieces(k, turn, depth)
                    return begin + k * STEP + jnp.where(k >= turn, jump, 0)

                count = choose(which, lambda name: phases[name].steps)
                return steps(tiles, count, row_of, window, carry)

            carry = lax.fori_loop(0, choose(which, lambda name: phases[name].count_of(block)), unit, carry)
            watch.asked(n, which)
            return attention(n, jnp.where(which == 0, items, 0), carry)

        asked: Carry = lax.fori_loop(0, len(phases) + zero, phase, carry)
        return asked

    carry = lax.fori_loop(0, step.layers, layer, (jnp.int32(0), jnp.int32(0)))
    if "head" not in step.left_out:
        everything = Window(step.slots, step.slots, 0)  # nobody waits for a message beside the head
        units = step.head_units

        def tile_of_head(i: Any, carry: Carry) -> Carry:
            begin = units.row(*units.unit(block, i))

            def row_of(k: Any) -> Any:
                if units.tiles == 1:
                    return begin + k * STEP
                return begin + of_pieces(k, units.piece_steps, units.weight.depth)

            return steps(head, units.steps, row_of, everything, carry)

        lax.fori_loop(0, units.count_of(block), tile_of_head, carry)


def of_pieces(k: Any, turn: Any, depth: Any) -> Any:
    """The packed row of a unit's k-th step, from its first one: `turn` steps of the one row tile, as many of the other,
    then those of the next piece."""
    piece, within = lax.div(k, jnp.int32(2 * turn)), lax.rem(k, jnp.int32(2 * turn))
    return (piece * turn + lax.rem(within, jnp.int32(turn))) * STEP + jnp.where(within >= turn, depth, 0)
