"""The memory warpgroup of the persistent step: weight tiles and old KV into one ring, in the order of their use.

It never waits for another block. What it reads nobody writes during the step, but for the newest token's keys and
values: whoever uses those reads them again (`persistent_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.attention import BLOCK
from mlxcel_jax_cuda.kernels.attention_schedule import FIELDS
from mlxcel_jax_cuda.kernels.mosaic import plgpu
from mlxcel_jax_cuda.kernels.persistent_shape import Step, Units, Window
from mlxcel_jax_cuda.kernels.persistent_watch import Watch
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import TILE

Carry = tuple[Any, ...]
"""Ring steps that have been asked for, and those known to have arrived; then where `Ahead` is."""


@attrs.frozen
class Work:
    """A block's share of the decode attention of a step: the same in every layer.

    Item n of a block is the (item, KV head) of number n * sms + block.
    """

    step: Step
    block: Any
    work: Any  # [items, FIELDS + tiles] int32, see `attention_schedule`
    rows: Any  # [N, 2] int32
    tables: Any  # [N, P] int32

    @property
    def items(self) -> Any:
        if "attention" in self.step.left_out:
            return jnp.int32(0)
        used = self.rows[self.rows.shape[0] - 1, 0] + self.rows[self.rows.shape[0] - 1, 1]
        return lax.div(used * self.step.kv_heads - self.block + (self.step.sms - 1), jnp.int32(self.step.sms))

    def place(self, n: Any) -> tuple[Any, Any]:
        """(item, KV head)."""
        number, heads = n * self.step.sms + self.block, jnp.int32(self.step.kv_heads)
        return lax.div(number, heads), lax.rem(number, heads)

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


@attrs.frozen
class Ahead:
    """Weights on their way into L2, up to `window.ahead` steps before the ring asks for them: what the ring has no room
    for while the other warpgroup waits. It goes through the steps in the ring's order, one unit a phase."""

    step: Step
    block: Any
    tiles: Any
    units: tuple[Units, ...]
    first: tuple[Any, ...]  # row of each phase's unit in a layer
    ends: tuple[Any, ...]  # steps of a layer up to the end of each phase

    @classmethod
    def of(cls, step: Step, block: Any, tiles: Any) -> Ahead | None:
        """None where it is switched off, or a block has several units of a phase."""
        units = tuple(step.product_phases.values())
        if not step.window.ahead or any(u.count > step.sms for u in units):
            return None
        first = tuple(u.row(*u.unit(block, jnp.int32(0))) for u in units)
        ends, end = [], jnp.int32(0)
        for u in units:
            end = end + u.count_of(block) * u.steps
            ends.append(end)
        return cls(step, block, tiles, units, first, tuple(ends))

    def begin(self) -> Carry:
        """(layer, step in it, steps that are ahead of the ring)."""
        return jnp.int32(0), jnp.int32(0), jnp.int32(0)

    def asked(self, carry: Carry) -> Carry:
        """The ring has asked for a step of weights: two more may come ahead of it."""
        layer, at, lead = carry
        layer, at = self._next(layer, at, lead == 0)
        return self._bring(self._bring((layer, at, jnp.maximum(lead - 1, 0))))

    def _bring(self, carry: Carry) -> Carry:
        """One more step, if it is near enough."""
        layer, at, lead = carry
        wanted = (lead < self.step.window.ahead) & (layer < self.step.layers)
        row, begin = jnp.int32(0), jnp.int32(0)
        for units, first, end in zip(self.units, self.first, self.ends, strict=True):
            row = jnp.where((at >= begin) & (at < end), units.row_of_step(first, at - begin), row)
            begin = end
        row = pl.multiple_of(layer * self.step.layer_rows + row, STEP)

        @pl.when(wanted)
        def _into_l2() -> None:
            plgpu.async_prefetch(self.tiles.at[pl.ds(row, STEP)])

        return *self._next(layer, at, wanted), lead + wanted.astype(jnp.int32)

    def _next(self, layer: Any, at: Any, forward: Any) -> tuple[Any, Any]:
        over = forward & (at + 1 >= self.ends[-1])
        return jnp.where(over, layer + 1, layer), jnp.where(over, 0, jnp.where(forward, at + 1, at))


def fill(step: Step, ring: Ring, tiles: Any, head: Any, keys: Any, values: Any, work: Work, watch: Watch) -> None:
    """All a block reads in a step. tiles [L * R, 64], head [V * D / 64, 64], keys and values [L * pages, K, page_size,
    d], all in device memory."""
    window, copies, block = step.window, step.copies, work.block
    tile = min(step.page_size, STEP)

    ahead = Ahead.of(step, block, tiles)

    def ask(carry: Carry, under_way: Any, start: Callable[[Any, Any], None], layered: bool = False) -> Carry:
        number, here, *before = carry
        slot = ring.slot(number)

        def has_come(earlier: Any, _: Any) -> Any:
            plgpu.barrier_wait(ring.full.at[ring.slot(earlier)])
            return earlier + 1

        plgpu.barrier_wait(ring.empty.at[slot])
        here = lax.fori_loop(here, jnp.maximum(here, number + 1 - under_way), has_come, here)
        start(slot, ring.full.at[slot])
        if ahead is not None and layered:
            before = list(ahead.asked(tuple(before)))
        return number + 1, here, *before

    def weight(units: Units, source: Any, begin: Any, carry: Carry, window: Window = window) -> Carry:
        def unit(n: Any, carry: Carry) -> Carry:
            item, part = units.unit(block, n)
            first = begin + units.row(item, part)

            def fetch(k: Any, carry: Carry) -> Carry:
                row = units.row_of_step(first, k)

                def start(slot: Any, full: Any) -> None:
                    for i in range(copies):
                        rows = pl.ds(pl.multiple_of(row + i * tile, TILE), tile)
                        target = ring.slots.at[slot, pl.ds(i * tile, tile)]
                        plgpu.copy_gmem_to_smem(source.at[rows], target, full)

                under_way = jnp.where(k < window.steps, window.narrow, window.wide)
                return ask(carry, under_way, start, layered=source is tiles)

            asked: Carry = lax.fori_loop(0, units.steps, fetch, carry)
            return asked

        asked: Carry = lax.fori_loop(0, units.count_of(block), unit, carry)
        return asked

    count, first_record = work.items, work.record(jnp.int32(0), FIELDS + BLOCK // tile)
    tiles_of_block = BLOCK // tile
    page_rows = jnp.int32(step.kv_heads * step.page_size)

    def attention(layer: Any, carry: Carry) -> Carry:
        def item(n: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            (*asked, row, first, run, length), pool_rows = carry[:-tiles_of_block], list(carry[-tiles_of_block:])
            kv_head, upcoming = work.place(n)[1], work.record(n + 1, len(first_record))

            def pool_row(key: Any) -> Any:
                page = lax.div(key, jnp.int32(step.page_size))
                page = work.tables[row, jnp.minimum(page, work.tables.shape[1] - 1)]
                return jnp.where(key < length, page * page_rows + lax.rem(key, jnp.int32(step.page_size)), 0)

            def block_of_keys(b: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                asked, pool_rows = carry[:-tiles_of_block], carry[-tiles_of_block:]
                following = [pool_row(first + (b + 1) * BLOCK + i * tile) for i in range(len(pool_rows))]
                for source in (keys, values):
                    for run_of_keys in range(BLOCK // STEP):
                        for chunk in range(step.chunks):

                            def start(
                                slot: Any,
                                full: Any,
                                source: Any = source,
                                run_of_keys: int = run_of_keys,
                                chunk: int = chunk,
                            ) -> None:
                                for i in range(copies):
                                    at = pool_rows[run_of_keys * copies + i]
                                    page = layer * step.pages + lax.div(at, page_rows)
                                    offset = pl.multiple_of(lax.rem(at, jnp.int32(step.page_size)), TILE)
                                    dims = pl.ds(chunk * TILE, TILE)
                                    plgpu.copy_gmem_to_smem(
                                        source.at[page, kv_head, pl.ds(offset, tile), dims],
                                        ring.slots.at[slot, pl.ds(i * tile, tile)],
                                        full,
                                    )

                            asked = ask(asked, window.wide, start)
                return *asked, *following

            asked = lax.fori_loop(0, run, block_of_keys, (*asked, *pool_rows))[:-tiles_of_block]
            return *asked, *upcoming

        asked: Carry = lax.fori_loop(0, count, item, (*carry, *first_record))[: -len(first_record)]
        return asked

    phases = step.product_phases

    def layer(n: Any, carry: Carry) -> Carry:
        begin = n * step.layer_rows
        carry = weight(phases["qkv"], tiles, begin, carry)
        watch.asked(n, "qkv")
        carry = attention(n, carry)
        watch.asked(n, "attention")
        for name in ("o", "gate_up", "down"):
            carry = weight(phases[name], tiles, begin, carry)
            watch.asked(n, name)
        return carry

    carry = lax.fori_loop(
        0, step.layers, layer, (jnp.int32(0), jnp.int32(0), *(() if ahead is None else ahead.begin()))
    )
    if "head" not in step.left_out:
        everything = Window(step.slots, step.slots, 0)  # nobody waits for a message beside the head
        weight(step.head_units, head, jnp.int32(0), carry, everything)
