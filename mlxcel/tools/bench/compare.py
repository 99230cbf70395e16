"""A run beside an earlier file of records: what may be compared, and what counts as lost."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from mlxcel.errors import MlxcelError, UsageError
from mlxcel.tools.bench.cells import SHAPE, cell_of, cell_words
from mlxcel.tools.bench.records import TOOL
from mlxcel.tools.regression import BETTER, allowed, is_lost, loss_percent

SAME: Final = ("device", "backend", "level", "dtype", "model", "quantisation", "params")
"""Fields of a header in which two runs must agree: figures of another device or model say nothing."""

Record = Mapping[str, Any]
Shape = tuple[Any, ...]


class FiguresLost(MlxcelError):
    """A run was slower than an earlier one by more than a figure may lose."""

    code = "figures_lost"
    exit_code = 1


@attrs.frozen
class Verdict:
    """One figure of one cell, its median before and now."""

    shape: Shape
    figure: str
    before: float
    now: float

    @property
    def lost(self) -> bool:
        return is_lost(self.figure, self.shape[SHAPE.index("prompt_target_len")], self.before, self.now)

    @property
    def line(self) -> str:
        change = 100 * (self.now - self.before) / self.before
        word = "LOST" if self.lost else "better" if loss_percent(self.figure, self.before, self.now) < 0 else "held"
        return (
            f"{word:6} {self.figure:12} {self.before:.4g} -> {self.now:.4g} ({change:+.2f} %): {cell_words(self.shape)}"
        )


@attrs.frozen
class Base:
    """Earlier records: their headers, and the rows of each cell."""

    name: str
    headers: tuple[Record, ...]
    rows: Mapping[Shape, tuple[Record, ...]]

    @classmethod
    def read(cls, file: str) -> Base:
        """UsageError for a file that cannot be read, or that holds no rows of this tool."""
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines if line.strip()]
            headers = [record for record in records if record["kind"] == "header" and record["tool"] == TOOL]
            rows: dict[Shape, list[Record]] = {}
            for record in records:
                if record["kind"] == "row":
                    rows.setdefault(cell_of(record), []).append({name: float(record[name]) for name in BETTER})
            if (
                not headers
                or not rows
                or not all(0 < row[name] < math.inf for found in rows.values() for row in found for name in row)
            ):
                raise ValueError("no header with rows behind it")
        except OSError as error:
            raise UsageError(f"--compare {file}: {error.strerror or error}", hint="name a file of --out") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"--compare {file}: it holds no records of {TOOL}: {type(error).__name__}: {error}",
                hint="name a file that --out wrote, or that stdout was kept in",
            ) from error
        return cls(file, tuple(headers), {shape: tuple(found) for shape, found in rows.items()})

    def require_cells(self, shapes: Iterable[Shape]) -> None:
        """UsageError names the first cell that was not measured then."""
        missing = [shape for shape in shapes if shape not in self.rows]
        if missing:
            known = "; ".join(cell_words(shape) for shape in self.rows)
            raise UsageError(f"{self.name} has no cell of {cell_words(missing[0])}", hint=f"it has {known}")

    def require_same(self, header: Record) -> None:
        """UsageError for another device or model."""
        for before in self.headers:
            for name in SAME:
                if before.get(name) != header[name]:
                    raise UsageError(
                        f"{self.name} was measured with {name} {before.get(name)!r}, this run is with {header[name]!r}",
                        hint="measure a base of its own for it with --out",
                    )

    def verdicts(self, rows: Iterable[Record]) -> Iterator[Verdict]:
        """Of each cell of `rows` and each figure that may not get worse."""
        cells: dict[Shape, list[Record]] = {}
        for row in rows:
            cells.setdefault(cell_of(row), []).append(row)
        for shape, found in cells.items():
            for figure in BETTER:
                yield Verdict(shape, figure, _median(self.rows[shape], figure), _median(found, figure))


def require_held(verdicts: Sequence[Verdict]) -> str:
    """What is said where none is lost. FiguresLost where one is."""
    if lost := sum(verdict.lost for verdict in verdicts):
        raise FiguresLost(
            f"{lost} of {len(verdicts)} figures are worse by more than they may: {allowed()}",
            hint="that is the noise of an H200: measure both sides again in rounds (docs/benchmarking.md) before you "
            "believe it",
        )
    return f"{len(verdicts)} of {len(verdicts)} figures held; they may be worse by {allowed()}"


def _median(rows: Sequence[Record], figure: str) -> float:
    return statistics.median(float(row[figure]) for row in rows)
