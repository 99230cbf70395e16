"""Files of records: JSON objects, one a line, each with its `kind`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

Record = dict[str, Any]


class Refused(Exception):
    """What is asked for cannot be done as asked: exit code 2."""


def parse_line(line: str) -> Record | None:
    """None for a line that is no JSON object. NaN and infinities are no JSON."""
    try:
        found = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def read_records(path: Path) -> list[Record]:
    """Refused for a file that is none of this script's, saying why."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if (record := parse_line(line)) is None:
            raise Refused(f"{path}, line {number}: this is no record; was the writing cut short? Remove the line")
        records.append(record)
    if not (headers := of_kind(records, "header")) or not all(_is_header(header) for header in headers):
        raise Refused(f"{path} holds no records of rounds: there is no header that names arms")
    return records


class RecordFile:
    """Records are appended and flushed one by one. A file that `begin` made and nothing was written to goes with
    `drop`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def begin(self, *, append: bool) -> None:
        try:
            self._file = self._path.open("a" if append else "x", encoding="utf-8")
        except OSError as error:
            raise Refused(f"{self._path} cannot be written: {error}") from None

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        assert self._file is not None
        for record in records:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def end(self) -> None:
        if self._file is not None:
            self._file.close()

    def drop(self) -> None:
        self.end()
        if not self._path.stat().st_size:
            self._path.unlink()


def _is_header(record: Record) -> bool:
    def named(arms: Any) -> bool:
        return isinstance(arms, list) and all(isinstance(arm, dict) and "name" in arm for arm in arms)

    return named(record.get("arms")) and named(record.get("nulls")) and isinstance(record.get("rounds"), int)


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)
