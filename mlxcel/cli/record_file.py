"""The file that a measuring tool's flag names for its records."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from mlxcel.errors import MlxcelError, UsageError


class RecordFile:
    """Opened for appending at once, so that whether it can be written is known before anything runs; what it holds
    stays until there is something to put in its place. One that was made for nothing goes again."""

    def __init__(self, flag: str, file: str) -> None:
        """UsageError for one that cannot be opened. `flag` is what messages call it."""
        self._named, self._path = f"{flag} {file}", Path(file)
        self._new = not self._path.exists()
        try:
            self._stream = open(file, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            raise UsageError(
                f"{self._named} cannot be written: {error.strerror or error}", hint="name another file"
            ) from error

    def append(self, line: str) -> None:
        """MlxcelError where there is no room for it."""
        try:
            print(line, file=self._stream, flush=True)
        except OSError as error:
            raise MlxcelError(
                f"{self._named} cannot be written: {error.strerror or error}",
                hint="its disk may be full; stdout can have the same",
            ) from error

    def replace(self, text: str) -> None:
        """`text` in the place of all that the file holds; a device or a pipe holds nothing."""
        if stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
            self._stream.truncate(0)
        self.append(text)

    def close(self) -> None:
        with suppress(OSError):  # it writes again what could not be written
            self._stream.close()
        with suppress(OSError):
            if self._new and not self._path.stat().st_size:
                self._path.unlink()
