"""Exchange between blocks without signals: words that say themselves whether they are there.

A word of 32 bits with all bits set is missing. No result has that value: a float32 or bf16 that arithmetic makes is
never the NaN with all bits set. So whoever needs a result reads its words until none is missing. That is one way to L2
for the writer and one back for the reader; a counter takes a fence, an addition, a look, and then the reading itself.

Every exchange has two places, for even and for odd layers. Who writes one forgets the other: it then holds words of the
layer before, which everybody has read, since what is being written depends on it. The same thread writes a word and
forgets it, so the two cannot change places; and between forgetting and the next look lies a whole layer. All of that
holds as long as the tokens of one row go through every phase: so the first row is taken as real even if it is padding.
Without any, a block that adds no parts waits for nobody, and forgets what is still to be read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils as _utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm
from jaxlib.mlir.dialects import scf as _scf

from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels.mosaic import TILED, TRANSPOSED, WGMMA, plgpu, store
from mlxcel_jax_cuda.kernels.persistent_ptx import THREADS, Words
from mlxcel_jax_cuda.kernels.persistent_watch import PATIENCE, Watch
from mlxcel_jax_cuda.kernels.sizes import TILE

arith: Any = _arith  # their stubs know the operations, not the wrappers
llvm: Any = _llvm
scf: Any = _scf
mosaic_utils: Any = _utils

VALUES = 8
"""bf16 values of the 16 bytes that a thread moves at a time."""

EIGHT = 8
"""Columns of a run of wgmma's sums, of which a thread has two in each."""

WhenThere = Callable[[Callable[[], Words], int], Words]
"""From a reading of so many words: the words, once none is missing."""


def forgotten(layout: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Missing words, in registers."""
    bits = jnp.int32 if dtype == jnp.float32 else jnp.int16
    missing = plgpu.layout_cast(jnp.full(shape, -1, bits), layout)
    return lax.bitcast_convert_type(missing, dtype)


def forget_tokens(ref: Any) -> None:
    """ref [N, 64] bf16, as `store_tokens` writes it."""
    store(ref.T, forgotten(TRANSPOSED, (TILE, ref.shape[0]), jnp.bfloat16))


def forget_sums(ref: Any) -> None:
    """ref [64, N] float32."""
    store(ref, forgotten(WGMMA, (TILE, ref.shape[1]), jnp.float32))


def forget_squares(ref: Any) -> None:
    """ref [N] float32."""
    store(ref, forgotten(WGMMA.reduce(0), (ref.shape[0],), jnp.float32))


@attrs.frozen
class Exchange:
    """How a block reads what others write. `patient` False takes whatever is there: for measuring alone."""

    patient: bool = True
    watch: Watch | None = None

    def tokens(self, x: Any, first: Any, depth: int, target: Any, used: Any, run: int = 0, gap: int = 0) -> None:
        """x [8, …] bf16 in device memory, `depth` values of each row from `first` on -> target [8, …] in shared memory,
        tiled for wgmma. Rows from `used` on stay the zeros that they are in target. Behind every `run` values x has
        `gap` more, which are left out. Followed by `commit_smem`."""
        of_row, count = depth // VALUES, depth // THREADS
        alone = -(-of_row // THREADS)  # rounds with chunks of the first row, which is always there

        @self.inline(plgpu.RefType(), plgpu.RefType(TILED), SCALAR, SCALAR)
        def move(when_there: WhenThere, x: Any, target: Any, first: Any, used: Any) -> None:
            stride = ir.MemRefType(x.type).get_strides_and_offset()[0][0] * 2
            begin, shared, thread = ptx.address_of(x), ptx.shared_address(target), ptx.this_thread()
            first, used = (scalar.registers.flat[0] for scalar in (first, used))
            rows, places = ptx.rows_and_places(thread, count, of_row)

            def of_place(place: Any) -> Any:
                chunk = arith.addi(place, arith.divui(first, ptx.integer(VALUES)))
                if gap:
                    runs = arith.divui(chunk, ptx.integer(run // VALUES))
                    chunk = arith.addi(chunk, arith.muli(runs, ptx.integer(gap // VALUES)))
                return ptx.past(begin, arith.muli(chunk, ptx.integer(16)))

            def read(which: slice) -> Callable[[], Words]:
                def words() -> Words:
                    found: Words = []
                    for row, place in zip(rows[which], places[which], strict=True):
                        at = ptx.past(of_place(place), arith.muli(row, ptx.integer(stride)))
                        found += ptx.load(at, ptx.integer(0), 4, arith.cmpi(arith.CmpIPredicate.ult, row, used))
                    return found

                return words

            def bring(which: slice) -> None:
                chunks = list(zip(rows[which], places[which], strict=True))
                values = when_there(read(which), 4 * len(chunks))
                for j, (row, place) in enumerate(chunks):
                    ptx.store_shared(shared, ptx.tiled_place(row, place), values[4 * j : 4 * j + 4])

            bring(slice(0, alone))
            if count > alone:
                with mosaic_utils.when(arith.cmpi(arith.CmpIPredicate.ugt, used, ptx.integer(1))):
                    bring(slice(alone, None))

        move(x, target, first, used)

    def sums(self, parts: Sequence[Any]) -> list[jax.Array]:
        """parts [64, N] float32 each, in device memory -> the same in registers, as wgmma has its sums."""
        N, tiles = parts[0].shape[1], parts[0].shape[1] // EIGHT
        out = [plgpu.ShapeDtypeStruct((TILE, N), jnp.float32, layout=WGMMA)] * len(parts)

        @self.inline(WGMMA, *[plgpu.RefType()] * len(parts), out=out)
        def read(when_there: WhenThere, template: Any, *parts: Any) -> list[Any]:
            row, column = ptx.row_and_column()
            own = arith.addi(arith.muli(row, ptx.integer(N * 4)), column)
            places = [ptx.past(ptx.address_of(part), own) for part in parts]
            offsets = [4 * (rows * N + tile * EIGHT) for tile in range(tiles) for rows in (0, 8)]

            def words() -> Words:
                return [word for at in places for offset in offsets for word in ptx.load_at(at, offset, 2)]

            values = when_there(words, 4 * tiles * len(parts))
            pairs = [ptx.vector_of(values[i : i + 2]) for i in range(0, len(values), 2)]
            of_part = len(offsets)
            return [ptx.like(template, pairs[i : i + of_part]) for i in range(0, len(pairs), of_part)]

        found: list[jax.Array] = list(read(_templates(N)[0], *parts))
        ptx.meet()
        return found

    def partials(
        self, values: Any, stats: Any, strides: tuple[int, int], count: int, used: Any
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """The first [64, 8] and [2, 8] float32 of a run in device memory, and how many values lie between one and the
        next -> `count` of them in registers: maxima, sums and values. Zeros for those from `used` on."""
        whole = plgpu.ShapeDtypeStruct((TILE, EIGHT), jnp.float32, layout=WGMMA)
        of_columns = plgpu.ShapeDtypeStruct((EIGHT,), jnp.float32, layout=WGMMA.reduce(0))

        @self.inline(
            WGMMA, WGMMA.reduce(0), plgpu.RefType(), plgpu.RefType(), SCALAR,
            out=[*[of_columns] * (2 * count), *[whole] * count],
        )  # fmt: skip
        def read(when_there: WhenThere, template: Any, of_column: Any, values: Any, stats: Any, used: Any) -> list[Any]:
            row, column = ptx.row_and_column()
            own = arith.addi(arith.muli(row, ptx.integer(EIGHT * 4)), column)
            own_values, own_stats = ptx.past(ptx.address_of(values), own), ptx.past(ptx.address_of(stats), column)
            limit = used.registers.flat[0]
            wanted = [arith.cmpi(arith.CmpIPredicate.slt, ptx.integer(i), limit) for i in range(count)]

            def words() -> Words:
                found: Words = []
                for which in (0, 1):
                    for i, there in enumerate(wanted):
                        found += ptx.load_at(own_stats, 4 * (i * strides[1] + which * EIGHT), 2, there)
                for i, there in enumerate(wanted):
                    for rows in (0, 8):
                        found += ptx.load_at(own_values, 4 * (i * strides[0] + rows * EIGHT), 2, there)
                return found

            found = when_there(words, 8 * count)
            pairs = [ptx.vector_of(found[i : i + 2]) for i in range(0, len(found), 2)]
            made = [ptx.like(of_column, [pair]) for pair in pairs[: 2 * count]]
            return made + [ptx.like(template, pairs[i : i + 2]) for i in range(2 * count, 4 * count, 2)]

        found: list[jax.Array] = list(read(*_templates(EIGHT), values, stats, used))
        ptx.meet()
        return found[:count], found[count : 2 * count], found[2 * count :]

    def squares(self, squares: Any) -> jax.Array:
        """squares [count, N] float32 in device memory -> their total [N], added in index order.

        Eight threads of a warp have the same columns: of more than eight columns each adds up its share, and they tell
        one another."""
        (count, N), tiles = squares.shape, squares.shape[1] // EIGHT
        out = plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=WGMMA.reduce(0))

        @self.inline(WGMMA.reduce(0), plgpu.RefType(), out=out, waiting=None if tiles == 1 else once_there)
        def read(wait: Callable[..., Words], of_column: Any, squares: Any) -> Any:
            own = ptx.past(ptx.address_of(squares), ptx.row_and_column()[1])
            if tiles > 1:
                lane = arith.andi(ptx.this_thread(), ptx.integer(31))
                tile = arith.andi(arith.shrui(lane, ptx.integer(2)), ptx.integer(tiles - 1))
                own = ptx.past(own, arith.muli(tile, ptx.integer(EIGHT * 4)))

            def words(rows: int = count) -> Words:
                return [word for i in range(rows) for word in ptx.load_at(own, i * N * 4, 2)]

            values = wait(words, 2 * count) if tiles == 1 else wait(words(), words, lambda: words(1))
            total = of_column.registers.flat[0]
            for i in range(0, len(values), 2):
                total = arith.addf(total, ptx.vector_of(values[i : i + 2]))
            if tiles == 1:
                return ptx.like(of_column, [total])
            words_of_total = ptx.words_of(total, 2)
            of_quad = arith.andi(lane, ptx.integer(3))
            sources = [arith.addi(of_quad, ptx.integer(4 * tile)) for tile in range(tiles)]
            told = [[ptx.of_lane(word, source) for word in words_of_total] for source in sources]
            return ptx.like(of_column, [ptx.vector_of(pair) for pair in told])

        found: jax.Array = read(_templates(N)[1], squares)
        ptx.meet()
        return found

    def heads(
        self, heads: Any, row: Any, items: Sequence[Any], within: Sequence[Any], width: int, to: tuple[Any, Any]
    ) -> None:
        """heads [items, 2, N, 64] bf16: what each pair of qkv's row tiles leaves. Head i of the list is in item
        `items[i]`, the `within[i]`-th of it. All but the last two go to the rows of `to[0]` [8, d], tiled for wgmma;
        those, the newest key and value, to `to[1]` [2, d]. `width` is d/2. Followed by `commit_smem`."""
        count, of_head, N = len(items), 2 * width // VALUES, heads.shape[2]
        rounds = -(-count * of_head // THREADS)
        scalars = [row, *items, *within]

        @self.inline(plgpu.RefType(), plgpu.RefType(TILED), plgpu.RefType(), *[SCALAR] * len(scalars))
        def move(when_there: WhenThere, heads: Any, queries: Any, newest: Any, *scalars: Any) -> None:
            row, *rest = [scalar.registers.flat[0] for scalar in scalars]
            begin, thread = ptx.address_of(heads), ptx.this_thread()
            bases = [  # of each head's first half, in bytes
                arith.addi(
                    arith.muli(arith.addi(arith.muli(item, ptx.integer(2 * N)), row), ptx.integer(TILE * 2)),
                    arith.muli(inside, ptx.integer(width * 2)),
                )
                for item, inside in zip(rest[:count], rest[count:], strict=True)
            ]
            numbers = [arith.addi(thread, ptx.integer(j * THREADS)) for j in range(rounds)]
            which = [arith.divui(number, ptx.integer(of_head)) for number in numbers]
            places = [arith.subi(n, arith.muli(w, ptx.integer(of_head))) for n, w in zip(numbers, which, strict=True)]

            def words() -> Words:
                found: Words = []
                for head, place in zip(which, places, strict=True):
                    base = bases[0]
                    for i in range(1, count):
                        base = arith.select(arith.cmpi(arith.CmpIPredicate.eq, head, ptx.integer(i)), bases[i], base)
                    half = arith.divui(place, ptx.integer(width // VALUES))
                    inside = arith.subi(place, arith.muli(half, ptx.integer(width // VALUES)))
                    offset = arith.addi(base, arith.muli(half, ptx.integer(N * TILE * 2)))
                    offset = arith.addi(offset, arith.muli(inside, ptx.integer(16)))
                    found += ptx.load(begin, offset, 4, arith.cmpi(arith.CmpIPredicate.ult, head, ptx.integer(count)))
                return found

            values = when_there(words, 4 * rounds)
            to_queries, to_newest = ptx.shared_address(queries), ptx.shared_address(newest)
            for j, (head, place) in enumerate(zip(which, places, strict=True)):
                is_query = arith.cmpi(arith.CmpIPredicate.ult, head, ptx.integer(count - 2))
                is_any = arith.cmpi(arith.CmpIPredicate.ult, head, ptx.integer(count))
                newest_head = arith.subi(head, ptx.integer(count - 2))
                plain = arith.muli(arith.addi(arith.muli(newest_head, ptx.integer(of_head)), place), ptx.integer(16))
                at = arith.select(
                    is_query, arith.addi(to_queries, ptx.tiled_place(head, place)), arith.addi(to_newest, plain)
                )
                ptx.store_shared(at, ptx.integer(0), values[4 * j : 4 * j + 4], is_any)

        move(heads, *to, *scalars)

    def inline(
        self, *arguments: Any, out: Any = None, waiting: Callable[..., Words] | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """`inline_mgpu` of a function whose first argument is the way to wait, `WhenThere` or another."""
        watched = [] if self.watch is None or self.watch.places is None else [self.watch.places]
        places = [ref.at[i, self.watch.block] for ref in watched for i in (0, 1)] if self.watch is not None else []

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(places), *arguments), return_type=out)  # type: ignore[untyped-decorator]
            def whole(_context: Any, *given: Any) -> Any:
                notes = [ptx.address_of(place) for place in given[: len(places)]]
                wait = functools.partial(waiting or _when_there, self.patient, notes)
                return function(wait, *given[len(places) :])

            def call(*given: Any) -> Any:
                return whole(*places, *given)

            return call

        return decorate


def _when_there(patient: bool, notes: Words, read: Callable[[], Words], count: int) -> Words:
    """The words, once none is missing. With `notes`, the addresses of a block's places, not longer than `PATIENCE`."""
    i32 = ir.IntegerType.get_signless(32)
    loop = scf.WhileOp([i32] * (count + 1), [ptx.integer(0)])
    before = loop.before.blocks.append(i32)
    with ir.InsertionPoint.at_block_begin(before):
        words, [looks] = read(), before.arguments
        scf.condition(_again(patient, notes, words, looks), [*words, looks])
    after = loop.after.blocks.append(*[i32] * (count + 1))
    with ir.InsertionPoint.at_block_begin(after):
        scf.yield_([arith.addi(after.arguments[count], ptx.integer(1))])
    _note(notes, loop.results[count])
    return list(loop.results)[:count]


def once_there(patient: bool, notes: Words, words: Words, read: Callable[[], Words], few: Callable[[], Words]) -> Words:
    """Words that have been read: those that were missing once they are there. Which it is, a few of them tell: were all
    blocks to look for all of many words again and again, that would be as much traffic as the weights are."""
    count, i32 = len(words), ir.IntegerType.get_signless(32)
    loop = scf.WhileOp([i32] * (count + 1), [*words, ptx.integer(0)])
    before = loop.before.blocks.append(*[i32] * (count + 1))
    with ir.InsertionPoint.at_block_begin(before):
        *found, looks = before.arguments
        scf.condition(_again(patient, notes, found, looks), [*found, looks])
    after = loop.after.blocks.append(*[i32] * (count + 1))
    with ir.InsertionPoint.at_block_begin(after):
        if not notes:
            waiting = scf.WhileOp([], [])
            with ir.InsertionPoint.at_block_begin(waiting.before.blocks.append()):
                scf.condition(_missing(few()), [])
            with ir.InsertionPoint.at_block_begin(waiting.after.blocks.append()):
                scf.yield_([])
        scf.yield_([*read(), arith.addi(after.arguments[count], ptx.integer(1))])
    _note(notes, loop.results[count])
    return list(loop.results)[:count]


def _missing(words: Words) -> Any:
    """Whether any is."""
    return arith.cmpi(arith.CmpIPredicate.eq, _greatest(words), ptx.integer(-1))


def _greatest(words: Words) -> Any:
    """A missing word is the greatest that there is. By threes, for which there is one instruction, in a tree: comparing
    each word is twice as many, one behind the other."""
    while len(words) > 1:
        words = [functools.reduce(arith.maxui, words[i : i + 3]) for i in range(0, len(words), 3)]
    return words[0]


def _again(patient: bool, notes: Words, words: Words, looks: Any) -> Any:
    """Whether to look again, behind so many looks."""
    again = _missing(words)
    if not patient:
        again = arith.andi(again, arith.cmpi(arith.CmpIPredicate.ne, looks, looks))
    if notes:
        again = arith.andi(again, arith.cmpi(arith.CmpIPredicate.ult, looks, ptx.integer(PATIENCE)))
    return again


def _note(notes: Words, looks: Any) -> None:
    if notes:
        given_up = arith.cmpi(arith.CmpIPredicate.eq, looks, ptx.integer(PATIENCE))
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [*notes, given_up], _GIVEN_UP, "l,l,b", has_side_effects=True)


_GIVEN_UP = """{
.reg .pred first;
.reg .u32 phase, before;
ld.relaxed.gpu.global.u32 before, [$1];
setp.eq.and.u32 first, before, 0, $2;
@first ld.relaxed.gpu.global.u32 phase, [$0];
@first add.u32 phase, phase, 1;
@first st.relaxed.gpu.global.u32 [$1], phase;
}"""

SCALAR = plgpu.Layout.WG_SPLAT(())


def put_newest(ring: Any, newest: Any, slots: Sequence[Any], row: Any, head_dim: int) -> None:
    """newest [2, d] bf16 in shared memory -> row `row` of the ring slots, [side, 64 dims] of the newest key and value.
    Followed by `commit_smem`."""
    of_head = head_dim // VALUES

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(plgpu.RefType(TILED), plgpu.RefType(), *[SCALAR] * (len(slots) + 1))
    )
    def put(_context: Any, ring: Any, newest: Any, row: Any, *slots: Any) -> None:
        row, *where = [scalar.registers.flat[0] for scalar in (row, *slots)]
        slot_bytes = int(np.prod(ir.MemRefType(ring.type).shape[1:])) * 2
        thread = ptx.this_thread()
        is_any = arith.cmpi(arith.CmpIPredicate.ult, thread, ptx.integer(2 * of_head))
        side_and_chunk = arith.divui(thread, ptx.integer(TILE // VALUES))
        slot = where[0]
        for i in range(1, len(where)):
            slot = arith.select(arith.cmpi(arith.CmpIPredicate.eq, side_and_chunk, ptx.integer(i)), where[i], slot)
        place = arith.andi(thread, ptx.integer(TILE // VALUES - 1))
        words = ptx.load_shared(ptx.shared_address(newest), arith.muli(thread, ptx.integer(16)), is_any)
        of_tile = arith.muli(arith.shrui(row, ptx.integer(3)), ptx.integer(1024))
        at = arith.addi(arith.muli(slot, ptx.integer(slot_bytes)), of_tile)
        at = arith.addi(at, ptx.tiled_place(arith.andi(row, ptx.integer(7)), place))
        ptx.store_shared(ptx.shared_address(ring), at, words, is_any)

    put(ring, newest, row, *slots)


def clear(ref: Any) -> None:
    """All of a reference to bf16 in shared memory, tiled for wgmma, becomes zeros."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED),))  # type: ignore[untyped-decorator]
    def write(_context: Any, ref: Any) -> None:
        total = int(np.prod(ir.MemRefType(ref.type).shape)) * 2 // 16
        index = ir.IndexType.get()
        bounds = (arith.index_cast(index, x) for x in (ptx.this_thread(), ptx.integer(total), ptx.integer(THREADS)))
        loop = scf.ForOp(*bounds, [])
        with ir.InsertionPoint(loop.body):
            number = arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable)
            ptx.store_shared(ptx.shared_address(ref), arith.muli(number, ptx.integer(16)), [ptx.integer(0)] * 4)
            scf.yield_([])

    write(ref)


def fill(ref: Any, first: Any, threads: int, source: Any | None = None, used: Any | None = None) -> None:
    """A reference in device memory, contiguous, becomes missing words, or those of `source`: all of it, or its `used`
    first entries. `first`: this block's first thread of so many."""
    sources, size = [] if source is None else [source], ref.shape[0]

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(SCALAR, SCALAR, plgpu.RefType(), *[plgpu.RefType()] * len(sources))
    )
    def write(_context: Any, first: Any, used: Any, ref: Any, *sources: Any) -> None:
        shape = ir.MemRefType(ref.type)
        entry = int(np.prod(shape.shape[1:])) * (4 if shape.element_type == ir.F32Type.get() else 2)
        total = arith.divui(arith.muli(used.registers.flat[0], ptx.integer(entry)), ptx.integer(16))
        begin = arith.addi(first.registers.flat[0], ptx.this_thread())
        index = ir.IndexType.get()
        lower, upper, step = (arith.index_cast(index, x) for x in (begin, total, ptx.integer(threads)))
        loop = scf.ForOp(lower, upper, step, [])
        with ir.InsertionPoint(loop.body):
            offset = arith.muli(
                arith.index_cast(ir.IntegerType.get_signless(32), loop.induction_variable), ptx.integer(16)
            )
            words = ptx.load(ptx.address_of(sources[0]), offset, 4) if sources else [ptx.integer(-1)] * 4
            ptx.store_words(ptx.address_of(ref), offset, words)
            scf.yield_([])

    write(first, jnp.int32(size) if used is None else used, ref, *sources)


def _templates(columns: int) -> tuple[jax.Array, jax.Array]:
    """Zeros in the layouts of [64, N] and of [N]."""
    whole, of_columns = jnp.zeros((TILE, columns), jnp.float32), jnp.zeros((columns,), jnp.float32)
    return plgpu.layout_cast(whole, WGMMA), plgpu.layout_cast(of_columns, WGMMA.reduce(0))
