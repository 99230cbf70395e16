"""What is measured: cells, each a client's path with a prompt's length and a number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from mlxcel.errors import UsageError

Path = Literal["direct", "scheduler"]
PATHS: Final[tuple[Path, ...]] = ("direct", "scheduler")

SHAPE: Final = (
    *("path", "batch", "prompt_target_len", "max_tokens"),
    *("sampling", "prefill_chunk", "kv_storage_asked"),
)
"""The fields of a record that say which cell it is of."""


@attrs.frozen
class Cell:
    """`prompt_target_len` tokens are wanted; of them `prompt_tokens` leave room for `max_tokens` more."""

    path: Path
    batch: int
    prompt_target_len: int
    max_tokens: int

    def prompt_tokens(self, context: int) -> int:
        """What fits into a context of N = `context` positions. UsageError where not even one token does."""
        room = context - self.max_tokens
        if room < 1:
            raise UsageError(
                f"--max-tokens {self.max_tokens} leaves no room for a prompt: the context holds {context}",
                hint="ask for fewer tokens, or give a larger --ctx-size",
            )
        return min(self.prompt_target_len, room)


@attrs.frozen
class CellPlan:
    """The cells of each path in the order in which they run; `notes` say what was left out."""

    cells: Mapping[Path, tuple[Cell, ...]]
    notes: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[Cell, ...]:
        return tuple(cell for cells in self.cells.values() for cell in cells)

    @property
    def most_rows(self) -> int:
        return max(cell.batch for cell in self.all)


def plan_cells(paths: Sequence[Path], prompts: Sequence[int], batches: Sequence[int], max_tokens: int) -> CellPlan:
    """Every path, prompt and batch; the direct client has one row. UsageError where it alone is asked for more."""
    many = [batch for batch in batches if batch > 1]
    if many and paths == ("direct",):
        raise UsageError(
            f"--batch {many[0]}: the direct path runs one row", hint="--path scheduler runs many; or leave --batch out"
        )
    cells: dict[Path, tuple[Cell, ...]] = {}
    for path in paths:
        fitting = [batch for batch in batches if batch == 1 or path == "scheduler"]
        found = tuple(Cell(path, batch, length, max_tokens) for length in prompts for batch in fitting)
        if found:
            cells[path] = found
    notes = (f"batches of {', '.join(map(str, many))} rows: on the scheduler's path alone",)
    return CellPlan(cells, notes if many and "direct" in paths else ())


def cell_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the cell of a row or of a summary from others. KeyError for a record that is none."""
    return tuple(record[name] for name in SHAPE)


def cell_words(shape: Sequence[Any]) -> str:
    """What `cell_of` gives, for people."""
    named = dict(zip(SHAPE, shape, strict=True))
    return ", ".join(f"{name} {value}" for name, value in named.items())
