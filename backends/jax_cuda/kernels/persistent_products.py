"""The products of the persistent step, as its compute warpgroup carries them out: tokens, parts, and how each ends.

The order of summation is that of `row_products`: a part is one chain of steps into one float32 accumulator, and the
parts are added in index order, here by the block that owns the row tile, out of device memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels.mosaic import TRANSPOSED, WGMMA, across, along, load, plgpu, store, store_tokens
from mlxcel_jax_cuda.kernels.persistent_held import held_product
from mlxcel_jax_cuda.kernels.persistent_pages import keep
from mlxcel_jax_cuda.kernels.persistent_pieces import Piece, ask, put
from mlxcel_jax_cuda.kernels.persistent_shape import FEW, Step, Units
from mlxcel_jax_cuda.kernels.persistent_stream import Ring
from mlxcel_jax_cuda.kernels.persistent_watch import PHASES, Watch
from mlxcel_jax_cuda.kernels.persistent_words import Exchange, forget_squares, forget_sums, forget_tokens
from mlxcel_jax_cuda.kernels.rounding import add_scaled, rounded, turned
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import TILE

HOLDING, HELD = ("o", "gate_up"), 4
"""Phases whose weights wait for their tokens in registers, 32 of each thread a ring step, and steps of a unit. Between
qkv's tokens and gate_up's the ring is full and memory idle, unless slots are free: the exchanges there take longer than
what the ring has."""

MOST_DEPTH = 2048
"""Of a part that may: longer tokens need the registers themselves, since those of 8 rows are read at once."""

Sums = list[jax.Array]
"""[64, N] float32 of a row tile, or of both of a pair."""


class Ending(NamedTuple):
    """What becomes of a row tile's sums."""

    begin: Callable[[Any], Any]  # from the row tile: loads of what never changes
    more: Callable[[Any], list[Any]]  # from the row tile: other blocks' [64, N] float32 that the end needs
    end: Callable[[Sums, Any, Any, Sums], None]  # from the sums, the row tile, what was loaded, and those


@attrs.frozen
class Source:
    """The tokens of a product, in device memory."""

    x: Any  # [N, …] bf16
    squares: Any | None = None  # [D/64, N] float32
    run: int = 0  # behind every `run` values of x are `gap` that are not the product's
    gap: int = 0


@attrs.frozen
class Products:
    """What every product phase of a block uses."""

    step: Step
    block: Any
    ring: Ring
    exchange: Exchange
    watch: Watch
    used: Any  # rows up to the last real one
    tokens: Any  # [N, token_depth] bf16 in shared memory: a part of the depth, or a piece of it
    parts: Any  # [2, parts, row tiles, 64, N] float32 in device memory: for even layers and for odd ones

    def run(self, name: str, units: Units, first_step: Any, layer: Any, source: Source, ending: Ending) -> Any:
        """A block's units of one phase; the ring step behind them."""
        weight, count, exchange = units.weight, units.count_of(self.block), self.exchange
        if name == "o" and "attention" in self.step.left_out:
            exchange = attrs.evolve(exchange, patient=False)

        def moment(what: str) -> None:
            if name in PHASES:
                self.watch.moment(layer, name, what)

        def piece(first: Any, used: Any) -> Piece:
            return Piece(source.x, first, units.piece, used, source.run, source.gap)

        def nth(first: Any, number: Any) -> Piece:
            """Behind the last there is one of no rows."""
            return piece(first + number * units.piece, jnp.where(number < units.pieces, self.used, 0))

        def bring_piece(piece: Piece, looked: jax.Array, is_first: Any = True) -> None:
            ptx.meet()  # all warps have read those before
            put(exchange, piece, looked, self.tokens)
            plgpu.commit_smem()
            pl.when(is_first)(lambda: moment("tokens here"))

        def bring_tokens(first: Any) -> None:
            if self.step.rows > FEW:
                only = piece(first, self.used)
                bring_piece(only, ask(exchange, only))
                return
            ptx.meet()  # all warps have read those before
            exchange.tokens(source.x, first, units.piece, self.tokens, self.used, source.run, source.gap)
            plgpu.commit_smem()
            moment("tokens here")

        def scale(squares: jax.Array) -> jax.Array:
            return across(lax.rsqrt(squares / weight.depth + self.step.eps), self.step.rows)

        @pl.when(count > 0)
        def _units() -> None:
            moment("waits")
            few = self.step.rows == FEW
            short = few and weight.pair > 1 and units.part_steps <= HELD  # both row tiles, one at a time
            held = HELD if few and name in HOLDING and units.part_depth <= MOST_DEPTH and not short else 0
            held = min(held, units.part_steps)
            if weight.split == 1 and units.pieces == 1 and not held:
                bring_tokens(jnp.int32(0))
            by, early = None, weight.pair == 1 or units.pieces > 1
            if weight.split == 1 and early and source.squares is not None:
                by = scale(self._squares(source.squares))

            def unit(n: Any, carry: Any) -> Any:
                item, part = units.unit(self.block, n)
                first = part * units.part_depth
                step, by_here = first_step + n * units.steps, by
                weights = self._taken(step, held)
                if weight.split > 1 and units.pieces == 1:
                    bring_tokens(first)
                elif held:
                    pl.when(n == 0)(lambda: bring_tokens(jnp.int32(0)))
                ready = ending.begin(item)
                if units.pieces > 1:
                    pieces = functools.partial(nth, first)
                    sums = self._by_pieces(exchange, step, units, pieces, bring_piece)
                elif short:
                    sums = self._pair(step, units.part_steps)
                else:
                    sums = [self._product(step, units.part_steps, weights)]
                if weight.split == 1 and not early and source.squares is not None:
                    by_here = scale(self._squares(source.squares))  # the ring has room by now
                if len(sums) < units.tiles:
                    sums.append(self._product(step + units.part_steps, units.part_steps))
                moment("products done")

                def finish(others: list[Sums]) -> None:
                    """`others`: for each row tile the parts of other blocks."""
                    refs = ending.more(item)
                    waited = [ref for side in others for ref in side] + refs
                    factor = by_here
                    if weight.split > 1 and source.squares is not None:
                        factor = scale(self._squares(source.squares))  # while the parts are on their way
                    found = exchange.sums(waited) if waited else []
                    moment("parts seen")
                    totals, more = list(sums), found[len(waited) - len(refs) :]
                    for i, side in enumerate(others):
                        for j in range(len(side)):
                            totals[i] = totals[i] + found[i * len(side) + j]
                    ending.end(totals if factor is None else [x * factor for x in totals], item, ready, more)

                if weight.split == 1:
                    finish([[] for _ in sums])
                else:
                    self._split(units, sums, item, part, layer, finish)
                moment("over")
                return carry

            lax.fori_loop(0, count, unit, 0)

        return first_step + count * units.steps

    def _squares(self, squares: Any) -> jax.Array:
        return self.exchange.squares(squares)

    def _split(
        self,
        units: Units,
        sums: Sums,
        item: Any,
        part: Any,
        layer: Any,
        finish: Callable[[list[Sums]], None],
    ) -> None:
        """The owner of a row tile finishes it, the others give it their parts."""
        others, pair = units.weight.split - 1, units.weight.pair
        first = units.first_tile + item * pair
        here, before = lax.rem(layer, jnp.int32(2)), lax.rem(layer + 1, jnp.int32(2))

        @pl.when(part != 0)
        def _give() -> None:
            for i, total in enumerate(sums):
                store(self.parts.at[here, part - 1, first + i], total)
            for i in range(pair):
                forget_sums(self.parts.at[before, part - 1, first + i])

        @pl.when(part == 0)
        def _own() -> None:
            finish([[self.parts.at[here, other, first + i] for other in range(others)] for i in range(pair)])

    def _pair(self, first_step: Any, steps: int) -> Sums:
        """Both row tiles of a unit, from registers: in half of the time that weights in shared memory take, and by one
        code for the two."""
        none = plgpu.layout_cast(jnp.zeros((TILE, FEW), jnp.float32), WGMMA)

        def tile(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            begin = first_step + i * steps
            return carry[1], self._product(begin, steps, self._taken(begin, steps))

        turns = 2 + jnp.minimum(self.used, 0)  # which the compiler cannot count, and unroll
        return list(lax.fori_loop(0, turns, tile, (none, none)))

    def _taken(self, first_step: Any, steps: int) -> list[jax.Array]:
        """The weights of so many ring steps in registers, [64, 64] bf16 each; their slots are free."""
        ring, found = self.ring, []
        for k in range(steps):
            slot = ring.slot(first_step + k)
            plgpu.barrier_wait(ring.full.at[slot])
            found += [load(ring.slots.at[slot, pl.ds(half * TILE, TILE)]) for half in range(STEP // TILE)]
            plgpu.barrier_arrive(ring.empty.at[slot])
        return found

    def _product(self, first_step: Any, steps: int, taken: Sequence[jax.Array] = ()) -> jax.Array:
        """Of a part's ring steps, the first of which may be in registers."""
        held = len(taken) * TILE // STEP

        def add(acc: Any) -> None:
            self._multiply(acc, first_step + held, steps - held, held)

        def alone(acc: Any) -> jax.Array:
            add(acc)
            sums: jax.Array = acc[...]
            return sums

        if not taken:
            found: jax.Array = pl.run_scoped(alone, self._accumulator)
            return found
        found = held_product(taken, self.tokens)
        if steps > held:
            found = pl.run_state(add)(plgpu.ACC.init(found))
        return found

    def _by_pieces(
        self,
        exchange: Exchange,
        first_step: Any,
        units: Units,
        piece: Callable[[Any], Piece],
        bring: Callable[[Piece, jax.Array, Any], None],
    ) -> Sums:
        """A unit whose tokens come by pieces: of all its row tiles the steps of one before those of the next. Each sum
        is the chain that it is in `_product`."""

        def scope(*accumulators: Any) -> Sums:
            def use(number: Any, carry: Any) -> Any:
                step, looked = carry
                bring(piece(number), looked, number == 0)
                looked = ask(exchange, piece(number + 1))
                for acc in accumulators:
                    self._multiply(acc, step, units.piece_steps)
                    step = step + units.piece_steps
                return step, looked

            lax.fori_loop(0, units.pieces, use, (first_step, ask(exchange, piece(0))))
            return [acc[...] for acc in accumulators]

        found: Sums = pl.run_scoped(scope, *[self._accumulator] * units.tiles)
        return found

    @property
    def _accumulator(self) -> Any:
        return plgpu.ACC((TILE, self.step.rows), jnp.float32)

    def _multiply(self, acc: Any, first_step: Any, steps: int, before: int = 0) -> None:
        """acc += so many ring steps times the tokens in shared memory, of which `before` are multiplied already."""
        ring = self.ring

        def multiply(k: Any) -> None:
            slot = ring.slot(first_step + k)
            plgpu.barrier_wait(ring.full.at[slot])
            if "products" in self.step.left_out:
                return
            for half in range(STEP // TILE):
                tokens = self.tokens.at[:, pl.ds((before + k) * STEP + half * TILE, TILE)]
                plgpu.wgmma(acc, ring.slots.at[slot, pl.ds(half * TILE, TILE)], tokens.T)

        def release(k: Any) -> None:
            plgpu.barrier_arrive(ring.empty.at[ring.slot(first_step + k)])

        def step(k: Any, carry: Any) -> Any:
            multiply(k)
            plgpu.wgmma_wait(STEP // TILE)  # the step before has been read
            pl.when(k > 0)(lambda: release(k - 1))
            return carry

        lax.fori_loop(0, steps, step, 0)  # without its first step apart: instructions are fetched too
        plgpu.wgmma_wait(0)
        release(steps - 1)


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
class Carried:
    """The residual, and its norm but for the division by its root mean square: an exchange, [2, …]."""

    x: Any  # [2, D, N] float32
    scaled: Any  # [2, N, D] bf16
    squares: Any  # [2, D/64, N] float32


@attrs.frozen
class Ends:
    """How the products of a layer end. The exchanges are [2, …]: for even layers and for odd ones."""

    step: Step
    gains: Any  # [2 L + 1, D] float32
    bias: Any | None  # [L, F] float32 in the order of the tiles
    head_gains: Any | None  # [L, 2, 2, d/2] float32
    cos: Any  # [64, N] float32, one row a pair of dims, repeated for each head of a tile
    sin: Any
    page: Any  # [N] int32, -1 for a row that is padding
    place: Any  # [N] int32
    heads_made: Any  # [2, items, 2, N, 64] bf16: q, k and v, halves of heads
    hidden: Any  # [2, N, ffn] bf16
    logits: Any  # [N, V] float32
    best: Any | None  # [V/64, N] float32 twice: the largest logit of a row tile, and its first id on the tile
    removed: Any | None  # as `Removed` has it, of a step that has `best`
    keys: Any  # [L * pages, K, page_size, d] bf16, in place
    values: Any

    def residual(self, layer: Any, gain_row: Any, old: Any, to: Carried) -> Ending:
        """x += y, and what the norm with the gain of that row needs. old [D, N] float32."""
        here, before = lax.rem(layer, jnp.int32(2)), lax.rem(layer + 1, jnp.int32(2))

        def begin(item: Any) -> Any:
            return load(self.gains.at[gain_row, pl.ds(item * TILE, TILE)], WGMMA.reduce(1))

        def more(item: Any) -> list[Any]:
            return [old.at[pl.ds(item * TILE, TILE)]]

        def end(sums: Sums, item: Any, gain: Any, more: Sums) -> None:
            rows, new = pl.ds(item * TILE, TILE), more[0] + sums[0]
            store_tokens(to.scaled.at[here, :, rows], new * along(gain, self.step.rows))
            store(to.squares.at[here, item], jnp.sum(new * new, axis=0))
            store(to.x.at[here, rows], new)
            forget_tokens(to.scaled.at[before, :, rows])
            forget_squares(to.squares.at[before, item])
            forget_sums(to.x.at[before, rows])

        return Ending(begin, more, end)

    def gate(self, layer: Any) -> Ending:
        here, before = lax.rem(layer, jnp.int32(2)), lax.rem(layer + 1, jnp.int32(2))

        def end(sums: Sums, item: Any, _ready: Any, _more: Sums) -> None:
            (gate, up), rows = sums, pl.ds(item * TILE, TILE)
            store_tokens(self.hidden.at[here, :, rows], gate / (1 + exact_exp(-gate)) * up)
            forget_tokens(self.hidden.at[before, :, rows])

        return Ending(_nothing, _no_more, end)

    def logit(self) -> Ending:
        def begin(_item: Any) -> Any:
            return None if self.removed is None else (self.removed.tiles[0], self.removed.tiles[1])

        def end(sums: Sums, item: Any, ready: Any, _more: Sums) -> None:
            for i, total in enumerate(sums):
                tile = item * len(sums) + i
                store_tokens(self.logits.at[:, pl.ds(tile * TILE, TILE)], total)
                if self.best is not None:
                    self._tell(total, tile)
                if ready is None:
                    continue

                @pl.when((tile >= ready[0]) & (tile <= ready[1]))
                def _again(total: jax.Array = total, tile: Any = tile) -> None:
                    self._tell(self._without(total, tile), tile)

        return Ending(begin, _no_more, end)

    def _tell(self, logits: jax.Array, tile: Any) -> None:
        for ref, found in zip(self.best or (), self._largest(logits, tile), strict=True):
            store(ref.at[tile], found)

    def _without(self, logits: jax.Array, tile: Any) -> jax.Array:
        """-inf at the ids that rows remove; what is no number stays, which is their fault all the same."""
        N, ids_g = self.step.rows, self.removed.ids  # type: ignore[union-attr]
        row = plgpu.broadcasted_iota(jnp.int32, (TILE, N), 0, layout=WGMMA) + tile * TILE
        for place in range(ids_g.shape[0]):
            gone = (row == across(load(ids_g.at[place], WGMMA.reduce(0)), N)) & (logits < jnp.inf)
            logits = jnp.where(gone, -jnp.inf, logits)
        return logits

    def _largest(self, logits: jax.Array, tile: Any) -> tuple[jax.Array, jax.Array]:
        """As `persistent_reference.largest`, of one row tile."""
        N, named = self.step.rows, self.step.named
        row = plgpu.broadcasted_iota(jnp.int32, (TILE, N), 0, layout=WGMMA)
        logits = jnp.where(logits < jnp.inf, logits, jnp.inf)
        if named < self.step.head.rows:
            kept = (row < named - tile * TILE) | (logits == jnp.inf)
            logits = jnp.where(kept, logits, -jnp.inf)
        most = jnp.max(logits, axis=0)
        before = jnp.where(logits == across(most, N), -row.astype(jnp.float32), -float(TILE))
        return most, -jnp.max(before, axis=0)

    def heads(self, layer: Any) -> Ending:
        """q, k and v as attention wants them: bias, norm by head, rotary embedding; k and v onto their pages."""
        step, N = self.step, self.step.rows
        here, before = lax.rem(layer, jnp.int32(2)), lax.rem(layer + 1, jnp.int32(2))

        def begin(item: Any) -> Any:
            biases, gains = None, None
            if self.bias is not None:
                rows = [pl.ds((2 * item + i) * TILE, TILE) for i in (0, 1)]
                biases = [load(self.bias.at[layer, r], WGMMA.reduce(1)) for r in rows]
            if self.head_gains is not None:
                of_k = (item >= step.heads // step.together).astype(jnp.int32)
                gains = [load(self.head_gains.at[layer, of_k, i], WGMMA.reduce(1)) for i in (0, 1)]
            return biases, gains, load(self.cos), load(self.sin)

        def end(sums: Sums, item: Any, ready: Any, _more: Sums) -> None:
            (first, second), (biases, gains, cos, sin) = sums, ready
            if biases is not None:
                first, second = (rounded(x) + along(bias, N) for x, bias in zip(sums, biases, strict=True))
            turns = item * step.together < step.heads + step.kv_heads  # else it is v
            a, b = first, second
            if gains is not None:  # one head an item, so a column's sum of squares is that head's
                scale = across(lax.rsqrt(jnp.sum(add_scaled(a, a, b, b), axis=0) / step.head_dim + step.eps), N)
                a, b = a * scale * along(gains[0], N), b * scale * along(gains[1], N)
            made = turned(a, b, cos, sin)
            first, second = (jnp.where(turns, x, y) for x, y in zip(made, (first, second), strict=True))
            halves = [plgpu.layout_cast(x.astype(jnp.bfloat16), TRANSPOSED) for x in (first, second)]
            for half, values in enumerate(halves):
                store(self.heads_made.at[here, item, half].T, values)
            for half in (0, 1):
                forget_tokens(self.heads_made.at[before, item, half])

            @pl.when(item * step.together >= step.heads)
            def _keep() -> None:
                pools, where = (self.keys, self.values), (self.page, self.place)
                keep(step, pools, where, layer, item * step.together, [first, second])

        return Ending(begin, _no_more, end)


def _nothing(_item: Any) -> None:
    return None


def _no_more(_item: Any) -> list[Any]:
    return []
