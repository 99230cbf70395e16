"""The products of the persistent step, as its compute warpgroup carries them out: tokens, parts, and how each ends.

The order of summation is that of `row_products`: a part is one chain of steps into one float32 accumulator, and the
parts are added in index order, here by the block that owns the row tile, out of device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import TRANSPOSED, WGMMA, across, along, load, plgpu, store, store_tokens
from mlxcel_jax_cuda.kernels.persistent_barrier import Counters
from mlxcel_jax_cuda.kernels.persistent_shape import COLUMNS, Step, Units
from mlxcel_jax_cuda.kernels.persistent_stream import Ring
from mlxcel_jax_cuda.kernels.persistent_watch import PHASES, Watch
from mlxcel_jax_cuda.kernels.row_products_stream import inverse_rms
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import TILE

Sums = list[jax.Array]
"""[64, N] float32 of a row tile, or of both of a pair."""

Begin = Callable[[Any], Any]
"""From the row tile: loads of this phase that do not need the sums."""

End = Callable[[Sums, Any, Any], None]
"""From the sums, the row tile and what `Begin` loaded. Everything is written when it returns."""


@attrs.frozen
class Products:
    """What every product phase of a block uses."""

    step: Step
    block: Any
    ring: Ring
    counters: Counters
    watch: Watch
    tokens: Any  # [N, token_depth] bf16 in shared memory
    tokens_here: Any
    parts: Any  # [split - 1, row tiles, 64, N] float32 in device memory

    def run(
        self,
        name: str,
        units: Units,
        first_step: Any,
        layer: Any,
        results: Any,
        x: Any,
        squares: Any | None,
        begin: Begin,
        end: End,
    ) -> Any:
        """A block's units of one phase; the ring step behind them. x [N, D] bf16 and squares [D/64, N] float32, in
        device memory, are there once so many `results` are."""
        weight, count = units.weight, units.count_of(self.block)

        def moment(what: str) -> None:
            if name in PHASES:
                self.watch.moment(layer, name, what)

        @pl.when(count > 0)
        def _units() -> None:
            moment("waits")
            self.counters.wait_for_results(results)
            moment("results seen")
            if weight.split == 1:
                self._ask_for_tokens(units, x, 0)
            scale = None if squares is None else across(inverse_rms(squares, weight.depth, self.step.eps), COLUMNS)
            if weight.split == 1:
                plgpu.barrier_wait(self.tokens_here)

            def unit(n: Any, carry: Any) -> Any:
                item, part = units.unit(self.block, n)
                if weight.split > 1:
                    self._ask_for_tokens(units, x, part)
                ready = begin(item)
                if weight.split > 1:
                    plgpu.barrier_wait(self.tokens_here)
                moment("tokens here")
                step = first_step + n * units.steps
                sums = [self._product(step + i * units.part_steps, units.part_steps) for i in range(weight.pair)]
                moment("products done")

                def finish(sums: Sums) -> None:
                    end(sums if scale is None else [total * scale for total in sums], item, ready)

                if weight.split == 1:
                    finish(sums)
                else:
                    self._add_parts(units, sums, item, part, layer, moment, finish)
                moment("over")
                return carry

            lax.fori_loop(0, count, unit, 0)

        return first_step + count * units.steps

    def _ask_for_tokens(self, units: Units, x: Any, part: Any) -> None:
        depth = units.part_depth
        columns = pl.ds(pl.multiple_of(part * depth, STEP), depth)
        plgpu.copy_gmem_to_smem(x.at[:, columns], self.tokens.at[:, pl.ds(0, depth)], self.tokens_here)

    def _product(self, first_step: Any, steps: int) -> jax.Array:
        ring = self.ring

        def multiply(k: Any, acc: Any) -> None:
            slot = ring.slot(first_step + k)
            plgpu.barrier_wait(ring.full.at[slot])
            if "products" in self.step.left_out:
                return
            for half in range(STEP // TILE):
                tokens = self.tokens.at[:, pl.ds(k * STEP + half * TILE, TILE)]
                plgpu.wgmma(acc, ring.slots.at[slot, pl.ds(half * TILE, TILE)], tokens.T)

        def release(k: Any) -> None:
            plgpu.barrier_arrive(ring.empty.at[ring.slot(first_step + k)])

        def scope(acc: Any) -> jax.Array:
            def step(k: Any, carry: Any) -> Any:
                multiply(k, acc)
                plgpu.wgmma_wait(STEP // TILE)  # the step before has been read
                release(k - 1)
                return carry

            multiply(0, acc)
            lax.fori_loop(1, steps, step, 0)
            plgpu.wgmma_wait(0)
            release(steps - 1)
            sums: jax.Array = acc[...]
            return sums

        found: jax.Array = pl.run_scoped(scope, plgpu.ACC((TILE, COLUMNS), jnp.float32))
        return found

    def _add_parts(
        self,
        units: Units,
        sums: Sums,
        item: Any,
        part: Any,
        layer: Any,
        moment: Callable[[str], None],
        finish: Callable[[Sums], None],
    ) -> None:
        counter, others, pair = units.first_counter + item, units.weight.split - 1, units.weight.pair

        @pl.when(part != 0)
        def _give() -> None:
            for i, total in enumerate(sums):
                store(self.parts.at[part - 1, item * pair + i], total)
            self.counters.signal(counter)

        @pl.when(part == 0)
        def _add() -> None:
            self.counters.wait(counter, (layer + 1) * others)
            given = [[load(self.parts.at[other, item * pair + i]) for other in range(others)] for i in range(pair)]
            totals = list(sums)
            for i, rest in enumerate(given):
                for other in rest:
                    totals[i] = totals[i] + other
            moment("parts seen")
            finish(totals)


def exact_exp(x: jax.Array) -> jax.Array:
    """exp of wgmma's [64, N], not by the one instruction that the kernel's other exponentials are: the bits of the
    launches of their own."""

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=WGMMA)
    )
    def exp(_context: Any, values: Any) -> Any:
        return values.exp(approx=False)

    found: jax.Array = exp(x)
    return found


@attrs.frozen
class Ends:
    """How the products of a layer end: what becomes of the sums of a row tile."""

    step: Step
    counters: Counters
    gains: Any  # [2 L + 1, D] float32
    bias: Any | None  # [L, F] float32 in the order of the tiles
    head_gains: Any | None  # [L, 2, 2, d/2] float32
    cos: Any  # [64, N] float32, one row a pair of dims, repeated for each head of a tile
    sin: Any
    page: Any  # [N] int32, -1 for a row that is padding
    place: Any  # [N] int32
    x: Any  # [D, N] float32, the residual, in place
    scaled: Any  # [N, D] bf16
    squares: Any  # [D/64, N] float32
    queries: Any  # [N, K, 8, d] bf16
    hidden: Any  # [N, ffn] bf16
    logits: Any  # [N, V] float32
    keys: Any  # [L * pages, K, page_size, d] bf16, in place
    values: Any
    staged: Any  # [2, N, together, d/2] bf16 in shared memory

    def nothing(self, _item: Any) -> None:
        return None

    def residual(self, gain_row: Any) -> tuple[Begin, End]:
        """x += y, and what the norm with the gain of that row needs."""

        def begin(item: Any) -> Any:
            rows = pl.ds(item * TILE, TILE)
            return load(self.x.at[rows]), load(self.gains.at[gain_row, rows], WGMMA.reduce(1))

        def end(sums: Sums, item: Any, ready: Any) -> None:
            (total,), (old, gain), rows = sums, ready, pl.ds(item * TILE, TILE)
            new = old + total
            store_tokens(self.scaled.at[:, rows], new * along(gain, COLUMNS))
            store(self.squares.at[item], jnp.sum(new * new, axis=0))
            store(self.x.at[rows], new)
            self.counters.result_is_there()

        return begin, end

    def gate(self, sums: Sums, item: Any, _ready: Any) -> None:
        gate, up = sums
        store_tokens(self.hidden.at[:, pl.ds(item * TILE, TILE)], gate / (1 + exact_exp(-gate)) * up)
        self.counters.result_is_there()

    def logit(self, sums: Sums, item: Any, _ready: Any) -> None:
        store_tokens(self.logits.at[:, pl.ds(item * TILE, TILE)], sums[0])

    def heads(self, layer: Any) -> tuple[Begin, End]:
        """q, k and v as attention wants them: bias, norm by head, rotary embedding; k and v onto their pages."""
        step = self.step

        def begin(item: Any) -> Any:
            biases, gains = None, None
            if self.bias is not None:
                rows = [pl.ds((2 * item + i) * TILE, TILE) for i in (0, 1)]
                biases = [load(self.bias.at[layer, r], WGMMA.reduce(1)) for r in rows]
            if self.head_gains is not None:
                of_k = (item >= step.heads // step.together).astype(jnp.int32)
                gains = [load(self.head_gains.at[layer, of_k, i], WGMMA.reduce(1)) for i in (0, 1)]
            return biases, gains, load(self.cos), load(self.sin)

        def end(sums: Sums, item: Any, ready: Any) -> None:
            (first, second), (biases, gains, cos, sin) = sums, ready
            if biases is not None:
                first, second = first + along(biases[0], COLUMNS), second + along(biases[1], COLUMNS)
            turned = item * step.together < step.heads + step.kv_heads  # else it is v
            a, b = first, second
            if gains is not None:  # one head an item, so a column's sum of squares is that head's
                scale = across(lax.rsqrt(jnp.sum(a * a + b * b, axis=0) / step.head_dim + step.eps), COLUMNS)
                a, b = a * scale * along(gains[0], COLUMNS), b * scale * along(gains[1], COLUMNS)
            first, second = jnp.where(turned, a * cos - b * sin, first), jnp.where(turned, b * cos + a * sin, second)
            for half, value in enumerate((first, second)):
                values = plgpu.layout_cast(value.astype(jnp.bfloat16), TRANSPOSED)
                store(self.staged.at[half].reshape(COLUMNS, TILE).T, values)
            plgpu.commit_smem()
            self._write_heads(layer, item * step.together)
            plgpu.wait_smem_to_gmem(0)
            self.counters.result_is_there()

        return begin, end

    def _write_heads(self, layer: Any, head: Any) -> None:
        step, width = self.step, self.step.head_dim // 2
        halves = [pl.ds(half * width, width) for half in (0, 1)]

        @pl.when(head < step.heads)
        def _queries() -> None:
            kv_head, column = lax.div(head, jnp.int32(step.group)), lax.rem(head, jnp.int32(step.group))
            for half, dims in enumerate(halves):
                if step.group == 1:
                    where = self.queries.at[:, pl.ds(kv_head, step.together), 0, dims]
                else:
                    where = self.queries.at[:, kv_head, pl.ds(column, step.together), dims]
                plgpu.copy_smem_to_gmem(self.staged.at[half], where)

        for pool, start in ((self.keys, step.heads), (self.values, step.heads + step.kv_heads)):

            @pl.when((head >= start) & (head < start + step.kv_heads))
            def _on_pages(pool: Any = pool, start: int = start) -> None:
                for column in range(COLUMNS):

                    @pl.when(self.page[column] >= 0)
                    def _write(column: int = column) -> None:
                        page, place = layer * step.pages + self.page[column], self.place[column]
                        for half, dims in enumerate(halves):
                            where = pool.at[page, pl.ds(head - start, step.together), place, dims]
                            plgpu.copy_smem_to_gmem(self.staged.at[half, column], where)
