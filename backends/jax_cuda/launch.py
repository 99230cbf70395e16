"""A step as launches: which executable runs, over which rows of the plan, and the one host buffer that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import jax
import numpy as np

from mlxcel.core.plan import StepPlan
from mlxcel_jax_cuda.numerics import TILE

NOWHERE = -1
"""The position of a padding token: it is written to no page and read by nobody."""


@attrs.frozen
class Shape:
    """Static shape of a launch: S rows of W tokens each, R of which give logits, P pages a row.

    A decode launch has W = 1, a piece S = 1. R is S, a tile for the last token of a piece, or W where all are scored.
    """

    rows: int
    width: int
    logits: int
    pages: int

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows * self.width

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The parts of the host buffer, int32, one behind the other."""
        S, W = self.rows, self.width
        return {
            "token_ids": (S, W),
            "positions": (S, W),
            "seq_lens": (S,),
            "slots": (S,),
            "state_reads": (S,),
            "state_writes": (S,),
            "logits_rows": (self.logits,),
            "page_tables": (S, self.pages),
        }

    def padding(self, slots: int) -> np.ndarray:
        """A buffer without a real row."""
        fills = {"token_ids": 0, "positions": NOWHERE, "slots": slots, "state_writes": 1, "page_tables": -1}
        parts = [np.full(size, fills.get(name, 0), np.int32) for name, size in self.fields.items()]
        return np.concatenate([part.reshape(-1) for part in parts])


class Fields(NamedTuple):
    """What a forward knows of its rows. A padding row has seq_len 0, and a slot behind the last."""

    token_ids: Any  # [S, W] int32, or CARRY
    positions: Any  # [S, W] int32, NOWHERE for padding
    seq_lens: Any  # [S] int32, positions in KV once this launch has run
    slots: Any  # [S] int32
    state_reads: Any  # [S] int32, 0 or 1: the copy of its recurrent state that a row begins with
    state_writes: Any  # [S] int32: and the one that it leaves
    logits_rows: Any  # [R] int32 of the T = S W tokens
    page_tables: Any  # [S, P] int32, -1 behind a row's last page


def unpack(shape: Shape, buffer: jax.Array) -> Fields:
    """The traced other side of `pack`."""
    parts, start = [], 0
    for size in shape.fields.values():
        length = int(np.prod(size))
        parts.append(buffer[start : start + length].reshape(size))
        start += length
    return Fields(*parts)


@attrs.frozen(eq=False)
class Launch:
    """One executable's share of a step."""

    shape: Shape
    buffer: np.ndarray  # int32, Shape.fields
    draws: np.ndarray  # int: places among the R of the plan whose logits these are
    logits: np.ndarray  # int: for each of them its place among the R of this launch
    slots: np.ndarray  # int32: and the slot whose carry it becomes


@attrs.frozen
class Widths:
    """The closed sets that launches are padded to, each ascending: decode rows D, and tokens of a piece W."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, *, slots: int, chunk: int, rows: Sequence[int], tokens: Sequence[int]) -> Widths:
        """Those of `rows` below the first that holds `slots`, and it; the same of `tokens` for `chunk`."""
        return cls(_up_to(slots, rows), _up_to(chunk, tokens))

    def decodes(self, pages: int) -> list[Shape]:
        """Every launch of rows that decode."""
        return [Shape(rows=rows, width=1, logits=rows, pages=pages) for rows in self.rows]

    def pieces(self, pages: int) -> list[Shape]:
        """Every launch of a piece of which at most a tile of tokens gives logits."""
        return [Shape(rows=1, width=width, logits=TILE, pages=pages) for width in self.tokens]

    def decode(self, count: int) -> int:
        return next(width for width in self.rows if width >= count)

    def piece(self, length: int) -> int:
        """The least width that holds `length`; the widest for a piece that takes several launches."""
        return next((width for width in self.tokens if width >= length), self.tokens[-1])


def _up_to(most: int, widths: Sequence[int]) -> tuple[int, ...]:
    below = tuple(width for width in widths if width < most)
    rest = [width for width in widths if width >= most]
    return (*below, rest[0] if rest else -(-most // TILE) * TILE)


def launches(plan: StepPlan, widths: Widths, *, slots: int, pages: int) -> Iterator[Launch]:
    """A step cut into a launch for all rows that decode and one or more for each piece, in the order of the plan."""
    places = _places(plan)
    decodes = np.flatnonzero(~plan.pieces)
    most = widths.rows[-1]
    for first in range(0, len(decodes), most):
        yield _decode(plan, decodes[first : first + most], places, widths, slots, pages)
    for row in np.flatnonzero(plan.pieces).tolist():
        start, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
        width = widths.piece(end - start)
        for begin in range(start, end, width):
            yield _piece(plan, row, begin, min(begin + width, end), width, slots, pages)


def _places(plan: StepPlan) -> np.ndarray:
    """int [T]: the place among the R of each token that gives logits, -1 for the others."""
    places = np.full(plan.num_tokens, -1, np.int64)
    places[plan.logits_rows] = np.arange(len(plan.logits_rows))
    return places


def _decode(plan: StepPlan, rows: np.ndarray, places: np.ndarray, widths: Widths, slots: int, pages: int) -> Launch:
    count, size = len(rows), widths.decode(len(rows))
    shape = Shape(rows=size, width=1, logits=size, pages=pages)
    tokens = plan.query_start[rows]
    tables = np.full((size, pages), -1, np.int32)
    tables[:count, : plan.page_tables.shape[1]] = plan.page_tables[rows][:, :pages]
    buffer = np.concatenate(
        [
            _padded(plan.token_ids[tokens], size, 0),
            _padded(plan.positions[tokens], size, NOWHERE),
            _padded(plan.seq_lens[rows], size, 0),
            _padded(plan.slots[rows], size, slots),
            _padded(plan.state_copies[rows], size, 0),
            _padded(1 - plan.state_copies[rows], size, 0),
            np.arange(size, dtype=np.int32),
            tables.reshape(-1),
        ]
    )
    wanted = places[tokens]
    drawing = np.flatnonzero(wanted >= 0)
    return Launch(shape, buffer, wanted[drawing], drawing, plan.slots[rows[drawing]])


def _piece(plan: StepPlan, row: int, begin: int, end: int, width: int, slots: int, pages: int) -> Launch:
    """Tokens `begin` … `end` - 1 of the plan, of one row. A later launch of a piece goes on with the state that the one
    before it left, so that the older copy stays as it was."""
    wanted = np.flatnonzero((plan.logits_rows >= begin) & (plan.logits_rows < end))
    count = TILE if len(wanted) <= TILE else width
    shape = Shape(rows=1, width=width, logits=count, pages=pages)
    table = np.full(pages, -1, np.int32)
    table[: plan.page_tables.shape[1]] = plan.page_tables[row][:pages]
    slot, copy = int(plan.slots[row]), int(plan.state_copies[row])
    first = begin == plan.query_start[row]
    buffer = np.concatenate(
        [
            _padded(plan.token_ids[begin:end], width, 0),
            _padded(plan.positions[begin:end], width, NOWHERE),
            np.array([plan.positions[end - 1] + 1, slot, copy if first else 1 - copy, 1 - copy], np.int32),
            _padded(plan.logits_rows[wanted] - begin, count, 0),
            table,
        ]
    )
    # Of positions that are scored none is a draw that the row goes on with.
    carries = slot if len(wanted) == 1 else slots
    return Launch(shape, buffer, wanted, np.arange(len(wanted)), np.full(len(wanted), carries, np.int32))


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    padded = np.full(size, fill, np.int32)
    padded[: len(values)] = values
    return padded
