"""Decode attention as a phase of the persistent step: partials of blocks of keys, and their merging.

Same order of summation as `decode_attention`, so the same bits. Old keys and values come through the ring and may have
been waiting there since before the queries were known. The newest token's come from the block that made them, with the
queries, and are put over what the ring has in their place.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels import attention
from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels.attention import BLOCK, HALF, MASKED, Scoring
from mlxcel_jax_cuda.kernels.attention_schedule import FIELDS
from mlxcel_jax_cuda.kernels.mosaic import TRANSPOSED, WGMMA, across, plgpu, store, store_tokens
from mlxcel_jax_cuda.kernels.persistent_shape import FEW, MOST_GROUP, Step
from mlxcel_jax_cuda.kernels.persistent_stream import Ring, Work
from mlxcel_jax_cuda.kernels.persistent_watch import Watch
from mlxcel_jax_cuda.kernels.persistent_words import (
    Exchange,
    clear,
    forget_squares,
    forget_sums,
    forget_tokens,
    put_newest,
)
from mlxcel_jax_cuda.kernels.rounding import add_scaled
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import TILE

FAN = 16
"""Partials that are loaded at a time."""

HALVES = BLOCK // HALF

Partial = tuple[jax.Array, jax.Array, list[jax.Array]]
"""Maximum [N] and sum [N] of some blocks, and their weighted values, [64, N] of 64 dims each."""

_spread = functools.partial(across, columns=MOST_GROUP)


def _merge(old: Partial, new: Partial) -> Partial:
    m, by, by_added = attention.factors(old[0], new[0])
    total = add_scaled(old[1], by, new[1], by_added)
    by, by_added = _spread(by), _spread(by_added)
    return m, total, [add_scaled(a, by, b, by_added) for a, b in zip(old[2], new[2], strict=True)]


@attrs.frozen
class Attention:
    """What the attention phase of a block uses."""

    step: Step
    work: Work
    ring: Ring
    exchange: Exchange
    watch: Watch
    heads_made: Any  # [2, items, 2, N, 64] bf16: q, k and v as `Ends` leaves them
    partials: Any  # [2, items, K, d, 8] float32 in device memory
    stats: Any  # [2, items, K, 2, 8] float32: maxima and sums
    mixed: Any  # [2, N, K, 8, d] bf16
    room: Any  # [N, token_room] bf16 in shared memory: the tokens' buffer, of few rows with zeros in padding
    newest: Any  # [2, d] bf16 in shared memory: key and value

    @property
    def queries(self) -> Any:
        """[8, d]"""
        return self.room.at[pl.ds(0, MOST_GROUP), pl.ds(BLOCK, self.step.head_dim)]

    def _weights(self, half: int) -> Any:
        """[8, HALF]"""
        return self.room.at[pl.ds(0, MOST_GROUP), pl.ds(half * HALF, HALF)]

    def run(self, layer: Any, first_step: Any) -> Any:
        """A block's items of a layer, then its share of the merging; the ring step behind them."""
        block, items, attended = self.work.block, self.work.items, jnp.int32(self.step.attended)
        merges = lax.div(attended - block + (self.step.sms - 1), jnp.int32(self.step.sms))

        def item(n: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, before, row, first, run, length = carry
            upcoming = self.work.record(n + 1, FIELDS)
            self.watch.moment(layer, "attention", "waits")
            pl.when(row != before)(lambda: self._bring_heads(layer, row, self.work.place(n)[1]))
            self.watch.moment(layer, "attention", "tokens here")
            step, partial = self._blocks(step, first, run, length)
            self.watch.moment(layer, "attention", "products done")
            self._give(layer, n, row, partial)
            self.watch.moment(layer, "attention", "over")
            return step, row, *upcoming

        record = self.work.record(jnp.int32(0), FIELDS)
        step = lax.fori_loop(0, items, item, (first_step, jnp.int32(-1), *record))[0]

        if self.step.rows == FEW:  # of more rows the padding comes with each piece

            @pl.when(items > 0)
            def _zeros_again() -> None:
                ptx.meet()  # all warps have read weights and queries
                clear(self.room.at[:, pl.ds(0, BLOCK + self.step.head_dim)])

        def merge(n: Any, carry: Any) -> Any:
            self._merge_one(layer, block + n * self.step.sms)
            return carry

        lax.fori_loop(0, merges, merge, 0)
        return step

    def _bring_heads(self, layer: Any, row: Any, kv_head: Any) -> None:
        step = self.step
        heads = [kv_head * step.group + i for i in range(step.group)]
        heads += [step.heads + kv_head, step.heads + step.kv_heads + kv_head]
        together = jnp.int32(step.together)
        items, within = [lax.div(head, together) for head in heads], [lax.rem(head, together) for head in heads]
        ptx.meet()  # all warps have read those before
        made = self.heads_made.at[lax.rem(layer, jnp.int32(2))]
        self.exchange.heads(made, row, items, within, step.head_dim // 2, (self.queries, self.newest))
        plgpu.commit_smem()

    def _blocks(self, step: Any, first: Any, run: Any, length: Any) -> tuple[Any, Partial]:
        """The ring step behind an item's blocks, and their partial."""
        scoring, chunks, ring = Scoring(self.step.scale), self.step.chunks, self.ring
        key = plgpu.broadcasted_iota(jnp.int32, (HALF, MOST_GROUP), 0, layout=WGMMA)
        of_side = BLOCK // STEP * chunks  # ring steps of a block's keys, and of its values

        def slot(step: Any, half: int, chunk: int) -> Any:
            return ring.slot(step + half // 2 * chunks + chunk)

        def has_come(step: Any) -> None:
            for i in range(of_side):
                plgpu.barrier_wait(ring.full.at[ring.slot(step + i)])

        def release(step: Any) -> None:
            for i in range(of_side):
                plgpu.barrier_arrive(ring.empty.at[ring.slot(step + i)])

        def block(b: Any, carry: Any) -> Any:
            step, *before = carry
            of_values = step + of_side
            newest = length - 1 - first - b * BLOCK  # the newest token's place in this block
            has_come(step)

            @pl.when(newest < BLOCK)
            def _newest() -> None:
                has_come(of_values)
                run_of_keys = lax.div(newest, jnp.int32(STEP))
                slots = [
                    ring.slot(step + (side * (BLOCK // STEP) + run_of_keys) * chunks + chunk)
                    for side in (0, 1)
                    for chunk in range(chunks)
                ]
                put_newest(ring.slots, self.newest, slots, lax.rem(newest, jnp.int32(STEP)), self.step.head_dim)
                plgpu.commit_smem()

            ahead = newest + 1 - key  # of a half's keys: 1 is the token's own

            def scores(*accumulators: Any) -> list[jax.Array]:
                for i, s in enumerate(accumulators):
                    for chunk in range(chunks):
                        keys = ring.slots.at[slot(step, i, chunk), pl.ds(i % 2 * HALF, HALF)]
                        plgpu.wgmma(s, keys, self.queries.at[:, pl.ds(chunk * TILE, TILE)].T)
                plgpu.wgmma_wait(0)
                return [s[...] for s in accumulators]

            s = pl.run_scoped(scores, *[plgpu.ACC((HALF, MOST_GROUP), jnp.float32)] * HALVES)
            release(step)
            s = [jnp.where(ahead > i * HALF, scoring.squash(x), MASKED) for i, x in enumerate(s)]
            m = scoring.maximum(jnp.max(functools.reduce(jnp.maximum, s), axis=0))
            p = [scoring.weights(x, _spread(m)) for x in s]
            for i, x in enumerate(p):
                self._weights(i).T[...] = plgpu.layout_cast(x.astype(jnp.bfloat16), TRANSPOSED)
            plgpu.commit_smem()

            @pl.when(newest >= BLOCK)
            def _not_yet() -> None:
                has_come(of_values)

            def weigh(*values: Any) -> tuple[jax.Array, list[jax.Array]]:
                for i in range(HALVES):
                    for chunk, acc in enumerate(values):
                        old = ring.slots.at[slot(of_values, i, chunk), pl.ds(i % 2 * HALF, HALF)]
                        plgpu.wgmma(acc, old.T, self._weights(i).T)
                # By halves, then over one half's rows: more rows would be added in an order that N changes.
                total = jnp.sum(functools.reduce(jnp.add, p), axis=0)
                plgpu.wgmma_wait(0)
                return total, [acc[...] for acc in values]

            total, values = pl.run_scoped(weigh, *[plgpu.ACC((TILE, MOST_GROUP), jnp.float32)] * chunks)
            release(of_values)
            merged = _merge((before[0], before[1], before[2:]), (m, total, values))
            return of_values + of_side, merged[0], merged[1], *merged[2]

        m, total, values = attention.start(WGMMA, (TILE, MOST_GROUP), 0)
        step, m, total, *values = lax.fori_loop(0, run, block, (step, m, total, *[values] * chunks))
        return step, (m, total, values)

    def _give(self, layer: Any, n: Any, row: Any, partial: Partial) -> None:
        """The result, where the row has no other item; else the partial, for whoever merges it."""
        (index, kv_head), alone = self.work.place(n), self.work.rows[row, 1] == 1
        m, total, values = partial

        @pl.when(alone)
        def _whole() -> None:
            for chunk, acc in enumerate(values):
                self._write(layer, row, kv_head, chunk * TILE, total, acc)

        @pl.when(jnp.logical_not(alone))
        def _part() -> None:
            here, before = lax.rem(layer, jnp.int32(2)), lax.rem(layer + 1, jnp.int32(2))
            dims = [pl.ds(chunk * TILE, TILE) for chunk in range(self.step.chunks)]
            for acc, part in zip(values, dims, strict=True):
                store(self.partials.at[here, index, kv_head, part], acc)
            for i, stat in enumerate((m, total)):
                store(self.stats.at[here, index, kv_head, i], stat)
            for part in dims:
                forget_sums(self.partials.at[before, index, kv_head, part])
            for i in (0, 1):
                forget_squares(self.stats.at[before, index, kv_head, i])

    def _merge_one(self, layer: Any, number: Any) -> None:
        """The result of 64 dims of a row and KV head, out of the partials of more than one item, or of none."""
        chunks, heads = self.step.chunks, self.step.kv_heads
        chunk, pair = lax.rem(number, jnp.int32(chunks)), lax.div(number, jnp.int32(chunks))
        row, head = lax.div(pair, jnp.int32(heads)), lax.rem(pair, jnp.int32(heads))
        first, used = self.work.rows[row, 0], self.work.rows[row, 1]

        @pl.when(used != 1)
        def _merge_items() -> None:
            dim = pl.multiple_of(chunk * TILE, TILE)
            part, place = pl.ds(dim, TILE), lax.rem(layer, jnp.int32(2))
            strides = heads * self.step.head_dim * MOST_GROUP, heads * 2 * MOST_GROUP

            def add_some(i: Any, old: attention.Partial) -> attention.Partial:
                run = place, first + i * FAN, head
                values, stats = self.partials.at[*run, part], self.stats.at[run]
                maxima, sums, merged = self.exchange.partials(values, stats, strides, FAN, used - i * FAN)
                self.watch.moment(layer, "attention", "parts seen")
                return attention.merge_run(old, i * FAN, used, maxima, sums, merged, _spread)

            begin = attention.start(WGMMA, (TILE, MOST_GROUP), 0)
            _, total, acc = lax.fori_loop(0, lax.div(used + FAN - 1, jnp.int32(FAN)), add_some, begin)
            self._write(layer, row, head, dim, total, acc)
            self.watch.moment(layer, "attention", "over")

    def _write(self, layer: Any, row: Any, kv_head: Any, dim: Any, total: jax.Array, acc: jax.Array) -> None:
        """64 dims from `dim` on; columns past the group hold whatever their queries were."""
        here, before = lax.rem(layer, jnp.int32(2)), lax.rem(layer + 1, jnp.int32(2))
        store_tokens(self.mixed.at[here, row, kv_head, :, pl.ds(dim, TILE)], attention.finish(total, acc, _spread))
        forget_tokens(self.mixed.at[before, row, kv_head, :, pl.ds(dim, TILE)])
