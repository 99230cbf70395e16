"""Files of records: JSON objects, one a line, each with its `kind`."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

Record = dict[str, Any]


class Refused(Exception):
    """What is asked for cannot be done as asked: exit code 2."""


class Lost(Exception):
    """What was measured cannot be kept: exit code 3."""


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
        if not path.is_file():
            raise OSError("it is no regular file" if path.exists() else "there is none")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if (record := parse_line(line)) is None:
            raise Refused(f"{path}, line {number}: this is no record; was the writing cut short? Remove the line")
        records.append(record)
        if (fault := _fault(record)) is not None:
            raise Refused(f"{path}, line {number}: {fault}; records of another version are not read")
    if not of_kind(records, "header"):
        raise Refused(f"{path} holds no records of rounds: there is no header that names arms")
    return records


class RecordFile:
    """Records are appended and flushed one by one. A file that `begin` made and nothing was written to goes with
    `drop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def begin(self, *, append: bool) -> None:
        """Refused where another run writes to it."""
        try:
            self._file = self.path.open("a" if append else "x", encoding="utf-8")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.end()
            raise Refused(f"another run writes to {self.path}: wait for it, or name another file") from None
        except OSError as error:
            raise Refused(f"{self.path} cannot be written: {error}") from None

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Lost where they cannot be written."""
        assert self._file is not None
        try:
            for record in records:
                self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self.end()
            raise Lost(f"{self.path} cannot be written: {error}") from None

    def end(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # closing writes again what could not be written
                self._file.close()

    def drop(self) -> None:
        self.end()
        if not self.path.stat().st_size:
            self.path.unlink()


def _header_fault(record: Record) -> str | None:
    """What keeps a header from being one of this script's."""
    for name, keys in (("arms", {"name", "flags"}), ("nulls", {"name", "flags", "source"})):
        arms = record.get(name)
        if not isinstance(arms, list) or not all(isinstance(arm, dict) and keys <= arm.keys() for arm in arms):
            return f"a header without {name} that have {', '.join(sorted(keys))}"
        if not all(isinstance(arm["name"], str) and isinstance(arm["flags"], list) for arm in arms):
            return f"a header with {name} whose name is no text or whose flags are no list"
    if not record["arms"] or type(record.get("rounds")) is not int:
        return "a header without arms and a number of rounds"
    for name in ("bin", "prompt_tokens", "extra"):
        if not isinstance(record.get(name), list):
            return f"a header whose {name} is no list"
    return None if "max_tokens" in record else "a header without max_tokens"


def _row_fault(record: Record) -> str | None:
    """The same of a row. Which figures it has is the measured program's affair."""
    if not isinstance(record.get("arm"), str) or type(record.get("round")) is not int:
        return "a row without the name of an arm and the number of a round"
    for name in ("path", "prompt_target_len", "prompt_tokens", "batch"):
        if isinstance(record.get(name), (list, dict)):
            return f"a row whose {name} is no single value"
    return None


def _fault(record: Record) -> str | None:
    """None for a record that can be computed with, or that nothing is computed from."""
    kind = record.get("kind")
    return _header_fault(record) if kind == "header" else _row_fault(record) if kind == "row" else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)
