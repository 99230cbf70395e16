"""A step as launches: which executable runs, over which rows of the plan, and the one host buffer that it reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from mlxcel.core.plan import StepPlan
from mlxcel_jax_cuda.numerics import TILE

SCORED = 64
"""Tokens of a launch that scores, or the least width above: so many rows of V logits it holds, and not its piece."""

NOWHERE = -1
"""The position of a padding token: it is written to no page and read by nobody."""


ALIGNED = 64
"""Each part of a host buffer begins at a multiple of so many words: XLA hands a kernel such a part where it lies, and a
kernel takes nothing that is not aligned to 256 bytes."""


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
    def words(self) -> str:
        """For people."""
        what = f"decode, rows={self.rows}" if self.width == 1 else f"piece, tokens={self.width} read={self.logits}"
        return f"{what} pages={self.pages}"

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

    @functools.cached_property
    def size(self) -> int:
        """Words of the host buffer."""
        return sum(aligned(math.prod(size)) for size in self.fields.values())

    @functools.cached_property
    def _places(self) -> tuple[tuple[slice, tuple[int, ...]], ...]:
        """Where each part lies in the host buffer, and its shape: asked for in each step."""
        places, start = [], 0
        for size in self.fields.values():
            length = math.prod(size)
            places.append((slice(start, start + length), size))
            start += aligned(length)
        return tuple(places)

    def padding(self, slots: int) -> np.ndarray:
        """A buffer without a real row."""
        buffer = np.zeros(self.size, np.int32)
        parts = self.cut(buffer)
        parts.positions[:], parts.slots[:], parts.state_writes[:], parts.page_tables[:] = NOWHERE, slots, 1, -1
        return buffer

    def cut(self, buffer: Any) -> Fields:
        """A buffer's parts: views of one of NumPy's, or traced."""
        return Fields(*[buffer[place].reshape(size) for place, size in self._places])


def aligned(words: int) -> int:
    """Words up to where the next part may begin."""
    return -(-words // ALIGNED) * ALIGNED


@attrs.frozen(eq=False)
class Launch:
    """One executable's share of a step."""

    shape: Shape
    buffer: np.ndarray  # int32, Shape.fields
    draws: np.ndarray  # int: places among the R of the plan whose logits these are
    logits: np.ndarray  # int: for each of them its place among the R of this launch
    slots: np.ndarray  # int32: and the slot whose carry it becomes

    @classmethod
    def of_padding(cls, shape: Shape, slots: int) -> Launch:
        """Without a row, to be run before there is one."""
        nobody = np.zeros(0, np.int32)
        return cls(shape, shape.padding(slots), nobody, nobody, nobody)


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
        return [self.decode_shape(rows, pages) for rows in self.rows]

    def pieces(self, pages: int) -> list[Shape]:
        """Every launch of a piece that is not scored."""
        return [self.piece_shape(width, pages) for width in self.tokens]

    def scores(self, pages: int) -> Shape:
        """The launch of tokens that are scored."""
        width = self.piece(SCORED)
        return Shape(rows=1, width=width, logits=width, pages=pages)

    def decode(self, count: int) -> int:
        return next(width for width in self.rows if width >= count)

    def decode_shape(self, count: int, pages: int) -> Shape:
        rows = self.decode(count)
        return Shape(rows=rows, width=1, logits=rows, pages=pages)

    def piece(self, length: int) -> int:
        """The least width that holds `length`; the widest for a piece that takes several launches."""
        return next((width for width in self.tokens if width >= length), self.tokens[-1])

    def piece_shape(self, length: int, pages: int) -> Shape:
        return Shape(rows=1, width=self.piece(length), logits=TILE, pages=pages)


def _up_to(most: int, widths: Sequence[int]) -> tuple[int, ...]:
    below = tuple(width for width in widths if width < most)
    rest = [width for width in widths if width >= most]
    return (*below, rest[0] if rest else -(-most // TILE) * TILE)


class Launching:
    """Cuts the steps of an engine: its widths, its slots, and P pages a row."""

    def __init__(self, widths: Widths, *, slots: int, pages: int) -> None:
        self._widths, self._slots, self.pages = widths, slots, pages
        self._padding: dict[Shape, np.ndarray] = {}  # a buffer without a real row, for each of a closed set of shapes

    @property
    def decodes(self) -> list[Shape]:
        """Every shape of a launch of rows that decode, the fewest rows first."""
        return self._widths.decodes(self.pages)

    @property
    def shapes(self) -> list[Shape]:
        """Every shape of a launch, but the one of tokens that are scored."""
        return [*self.decodes, *self._widths.pieces(self.pages)]

    @property
    def scores(self) -> Shape:
        return self._widths.scores(self.pages)

    def cut(self, plan: StepPlan) -> Iterator[Launch]:
        """A launch for all rows that decode and one or more for each piece, in the order of the plan."""
        widths = self._widths
        pieces = np.flatnonzero(plan.pieces).tolist()
        decodes = np.flatnonzero(~plan.pieces) if pieces else np.arange(plan.num_rows)
        most = widths.rows[-1]
        for first in range(0, len(decodes), most):
            yield self._decode(plan, decodes[first : first + most])
        for row in pieces:
            start, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
            scored = self._first_scored(plan, start, end)
            for shape, low, high in (
                (widths.piece_shape(scored - start, self.pages), start, scored),
                (self.scores, scored, end),
            ):
                for begin in range(low, high, shape.width):
                    yield self._piece(plan, row, begin, min(begin + shape.width, high), shape)

    def _first_scored(self, plan: StepPlan, start: int, end: int) -> int:
        """Where launches begin that score, of the tokens `start` … `end` - 1 of a piece; `end` where it draws at most.
        So many of their widths from its beginning, as at R1 every launch is."""
        wanted = plan.logits_rows[(plan.logits_rows >= start) & (plan.logits_rows < end)]
        if len(wanted) == 0 or not (plan.scores or len(wanted) > 1):
            return end
        return start + (int(wanted[0]) - start) // self.scores.width * self.scores.width

    def _decode(self, plan: StepPlan, rows: np.ndarray) -> Launch:
        count = len(rows)
        shape = self._widths.decode_shape(count, self.pages)
        buffer, fields = self._padded(shape)
        tokens = plan.query_start[rows]
        fields.token_ids[:count, 0] = plan.token_ids[tokens]
        fields.positions[:count, 0] = plan.positions[tokens]
        fields.seq_lens[:count] = plan.seq_lens[rows]
        fields.slots[:count] = slots = plan.slots[rows]
        fields.state_reads[:count] = copies = plan.state_copies[rows]
        fields.state_writes[:count] = 1 - copies
        fields.logits_rows[:] = range(shape.rows)
        tables = plan.page_tables[rows, : self.pages]
        fields.page_tables[:count, : tables.shape[1]] = tables
        if len(plan.logits_rows) == plan.num_rows == count:  # every row draws, and in this order
            return Launch(shape, buffer, (drawing := np.arange(count)), drawing, slots)
        wanted = _places(plan)[tokens]
        drawing = np.flatnonzero(wanted >= 0)
        return Launch(shape, buffer, wanted[drawing], drawing, slots[drawing])

    def _piece(self, plan: StepPlan, row: int, begin: int, end: int, shape: Shape) -> Launch:
        """Tokens `begin` … `end` - 1 of the plan, of one row. A later launch of a piece goes on with the state that the
        one before it left, so that the older copy stays as it was."""
        wanted = np.flatnonzero((plan.logits_rows >= begin) & (plan.logits_rows < end))
        buffer, fields = self._padded(shape)
        slot, copy = int(plan.slots[row]), int(plan.state_copies[row])
        fields.token_ids[0, : end - begin] = plan.token_ids[begin:end]
        fields.positions[0, : end - begin] = plan.positions[begin:end]
        fields.seq_lens[0], fields.slots[0] = plan.positions[end - 1] + 1, slot
        fields.state_reads[0] = copy if begin == plan.query_start[row] else 1 - copy
        fields.state_writes[0] = 1 - copy
        fields.logits_rows[: len(wanted)] = plan.logits_rows[wanted] - begin
        table = plan.page_tables[row, : self.pages]
        fields.page_tables[0, : len(table)] = table
        # Of positions that are scored none is a draw that the row goes on with.
        carries = self._slots if shape == self.scores else slot
        return Launch(shape, buffer, wanted, np.arange(len(wanted)), np.full(len(wanted), carries, np.int32))

    def _padded(self, shape: Shape) -> tuple[np.ndarray, Fields]:
        """A buffer of its own, and the same in parts."""
        if shape not in self._padding:
            self._padding[shape] = shape.padding(self._slots)
        buffer = self._padding[shape].copy()
        return buffer, shape.cut(buffer)


def _places(plan: StepPlan) -> np.ndarray:
    """int [T]: the place among the R of each token that gives logits, -1 for the others."""
    places = np.full(plan.num_tokens, -1, np.int64)
    places[plan.logits_rows] = np.arange(len(plan.logits_rows))
    return places
