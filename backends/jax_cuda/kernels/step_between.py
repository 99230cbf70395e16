"""What stands between the persistent steps of a run, as one launch: the draw of one, and the begin of the next.

The head has left the largest logit of each row tile. Who embeds tokens finds the largest of all for itself: to wait for
one block that does would take longer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.attention_schedule import Schedule
from mlxcel_jax_cuda.kernels.layers import layer_operand
from mlxcel_jax_cuda.kernels.mosaic import WGMMA, across, launch, load, plgpu, shaped, store
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.kernels.sizes import SMS, TILE
from mlxcel_jax_cuda.kernels.step_begin import (
    ROWS,
    Begun,
    Buffer,
    Pages,
    Planned,
    begun,
    embed_tokens,
    plan,
    planned_shapes,
    scratch,
)

THREADS = 128
"""Words of a buffer that a block copies: one a thread."""

AT_A_TIME = 4
"""Loads of 64 row tiles that are on their way together."""

FINE, NOT_A_NUMBER, NOTHING_ALLOWED = 0, 1, 2
"""A row's status, as the sampler has it."""


class Largest(NamedTuple):
    """What the head of a step has left. T row tiles, at least 64."""

    logits: jax.Array  # [T, N] float32, inf where a logit of the tile is no number or inf
    places: jax.Array  # [T, N] float32: the first id that has it, on its tile


class Begins(NamedTuple):
    """The step that begins."""

    begun: Begun
    planned: Planned  # its schedule's tables are a copy of the step's buffer
    turns: tuple[jax.Array, jax.Array]  # cos and sin [64, N] float32
    come: jax.Array  # [1] int32, 0: for the step to count in


@functools.partial(jax.jit, static_argnames=("step", "stride", "packed", "at", "draws_at", "pages", "sms"))
def between(
    step: int,
    buffer: jax.Array,
    turns: tuple[jax.Array, jax.Array] | None,
    last_tokens: jax.Array,
    largest: Largest | None,
    embed: jax.Array,
    gains: jax.Array,
    *,
    stride: int,
    packed: Weight | None,
    at: Buffer,
    draws_at: int,
    pages: Pages,
    sms: int = SMS,
) -> tuple[Begins | None, jax.Array, jax.Array | None]:
    """Step number `step` of a run begins, where there are `turns`; and the one before it is drawn, where it has left
    its `largest`: (what begins, last tokens with the draws, int32 [2, N], their ids and status).

    buffer int32 [steps * stride] of the run. turns: cos and sin [steps, 64, N] float32. last_tokens int32 [slots + 1].
    draws_at: where a step's part of the buffer has the slots of its draws. Others as in `begin_step`.
    """
    _check(buffer, turns, largest, stride, at)
    made: tuple[Begins | None, jax.Array, jax.Array | None] = _between(
        layer_operand(step), buffer, turns, last_tokens, largest, embed, gains,
        stride=stride, packed=packed, at=at, draws_at=draws_at, pages=pages, sms=sms,
    )  # fmt: skip
    return made


@functools.partial(jax.jit, static_argnames=("stride", "packed", "at", "draws_at", "pages", "sms"))
def _between(
    number: jax.Array,
    buffer: jax.Array,
    turns: tuple[jax.Array, jax.Array] | None,
    last_tokens: jax.Array,
    largest: Largest | None,
    embed: jax.Array,
    gains: jax.Array,
    *,
    stride: int,
    packed: Weight | None,
    at: Buffer,
    draws_at: int,
    pages: Pages,
    sms: int,
) -> tuple[Begins | None, jax.Array, jax.Array | None]:
    N, D, int32 = at.rows, gains.shape[1], jnp.int32
    groups, copies = N // ROWS, -(-stride // THREADS)
    parts = D // TILE if turns is not None else 1
    kept = None if largest is None else jax.new_ref(last_tokens)
    out: list[Any] = []
    if turns is not None:
        of_turns = [shaped((TILE, N), jnp.float32)] * 2
        out += [*begun(N, D), *planned_shapes(at, pages), *of_turns, shaped((stride,), int32), shaped((1,), int32)]
    if largest is not None:
        out.append(shaped((2, N), int32))

    def kernel(number_g: Any, buffer_g: Any, last_g: Any, embed_g: Any, gains_g: Any, *refs: Any) -> None:
        left = list(refs)
        all_turns = [left.pop(0) for _ in turns or ()]
        best = [left.pop(0) for _ in largest or ()]
        made = [left.pop(0) for _ in out]
        *room, found_s = left
        block, base = lax.axis_index("block"), number_g[0] * stride
        drawn = base - stride + draws_at

        @pl.when(block < parts * groups)
        def _tokens() -> None:
            part, first = lax.rem(block, int32(parts)), lax.div(block, int32(parts)) * ROWS
            if largest is not None:
                found = _found(best[0], best[1], first, found_s)
                pl.when(part == 0)(lambda: _keep(found, first, buffer_g, drawn, last_g, made[-1]))
            if turns is None:
                return
            ids = []
            for row in range(ROWS):
                asked, slot = (buffer_g[base + place + first + row] for place in (at.token_ids, at.slots))
                own = last_g[slot]
                if largest is not None:
                    own = jnp.where(buffer_g[drawn + first + row] == slot, found[row][0], own)
                ids.append(jnp.where(asked == at.carry, own, asked))
            embed_tokens(ids, part, first, embed_g, gains_g, packed, *made[:3], *room)

        if turns is None:
            return
        plan(block, buffer_g, base, at, pages, sms, *made[3:7])
        cos_g, sin_g, copy_g, come_g = made[7:11]

        @pl.when(block == 0)
        def _zero() -> None:
            come_g[0] = int32(0)

        @pl.when(block < 2)
        def _turns() -> None:
            for i, (to, source) in enumerate(zip((cos_g, sin_g), all_turns, strict=True)):

                @pl.when(block == i)
                def _one(to: Any = to, source: Any = source) -> None:
                    store(to, load(source.at[number_g[0]]))

        @pl.when(block < copies)
        def _copy() -> None:
            words = pl.ds(jnp.minimum(block * THREADS, stride - THREADS), THREADS)
            begin = pl.ds(base + jnp.minimum(block * THREADS, stride - THREADS), THREADS)
            store(copy_g.at[words], load(buffer_g.at[begin], plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)))

    blocks = parts * groups
    if turns is not None:
        blocks = max(blocks, pages.items(N, at.pages), N, copies)
    made = launch(
        kernel,
        out,
        [*scratch(), plgpu.SMEM((2, ROWS), jnp.float32)],
        *(number, buffer, last_tokens if kept is None else kept, embed, gains),
        *(turns or ()),
        *(largest or ()),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="thread",
    )
    last = last_tokens if kept is None else jax.freeze(kept)
    begins = None
    if turns is not None:
        page, place, work, rows = made[3:7]
        begins = Begins(
            Begun(*made[:3]), Planned(page, place, Schedule(work, rows, made[9])), (made[7], made[8]), made[10]
        )
    return begins, last, None if largest is None else made[-1]


def _found(logits_g: Any, places_g: Any, first: Any, found_s: Any) -> list[tuple[Any, Any]]:
    """Of eight rows from `first` on: the id that is drawn, -1 for none, and the status."""
    tiles, columns = logits_g.shape[0], pl.ds(first, ROWS)
    row = plgpu.broadcasted_iota(jnp.int32, (TILE, ROWS), 0, layout=WGMMA)
    loads = -(-tiles // TILE)

    def look(n: Any, carry: Any) -> Any:
        most, at = carry
        begins = [jnp.minimum((n * AT_A_TIME + i) * TILE, tiles - TILE) for i in range(AT_A_TIME)]
        for begin, seen in [(begin, load(logits_g.at[pl.ds(begin, TILE), columns])) for begin in begins]:
            more = seen > most
            most, at = jnp.where(more, seen, most), jnp.where(more, row + begin, at)
        return most, at

    nothing = plgpu.layout_cast(jnp.full((TILE, ROWS), -jnp.inf, jnp.float32), WGMMA)
    most, at = lax.fori_loop(0, -(-loads // AT_A_TIME), look, (nothing, row))
    total = jnp.max(most, axis=0)
    before = jnp.where(most == across(total, ROWS), -at.astype(jnp.float32), -float(tiles))
    store(found_s.at[0], total)
    store(found_s.at[1], -jnp.max(before, axis=0))
    plgpu.commit_smem()
    found = []
    for n in range(ROWS):
        largest, tile = found_s[0, n], found_s[1, n].astype(jnp.int32)
        token = tile * TILE + places_g[tile, first + n].astype(jnp.int32)
        status = jnp.where(largest == -jnp.inf, NOTHING_ALLOWED, FINE)
        status = jnp.where(largest == jnp.inf, NOT_A_NUMBER, status).astype(jnp.int32)
        found.append((jnp.where(status == FINE, token, -1).astype(jnp.int32), status))
    return found


def _keep(found: list[tuple[Any, Any]], first: Any, buffer_g: Any, drawn: Any, last_g: Any, words_g: Any) -> None:
    for n, (token, status) in enumerate(found):
        words_g[0, first + n], words_g[1, first + n] = token, status
        last_g[buffer_g[drawn + first + n]] = token


def _check(buffer: Any, turns: Any, largest: Any, stride: int, at: Buffer) -> None:
    if turns is None and largest is None:
        raise ValueError("nothing begins and nothing is drawn")
    if at.rows % ROWS or not at.rows:
        raise ValueError(f"{at.rows} rows: they must be a multiple of {ROWS}")
    if stride < THREADS or buffer.ndim != 1 or len(buffer) % stride:
        raise ValueError(f"a buffer of {buffer.shape} words, of {stride} a step: whole steps of {THREADS} at least")
    for table in turns or ():
        if table.shape != (len(buffer) // stride, TILE, at.rows):
            raise ValueError(f"turns are {table.shape}, not {(len(buffer) // stride, TILE, at.rows)}")
    for array in largest or ():
        if array.shape[0] < TILE or array.shape[1:] != (at.rows,):
            raise ValueError(f"largest logits are {array.shape}: of {TILE} row tiles at least, and {at.rows} rows")
