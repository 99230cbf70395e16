"""A file that is replaced as a whole: written beside it under a name of its own, which goes with the process that
writes, or with the next one that looks."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

_SUFFIX: Final = re.compile(r"\.[0-9a-f]{8}\.part")


def replace_whole(target: Path, write: Callable[[BinaryIO], None]) -> None:
    """What `write` writes, mode 0600, in the place of `target` or not at all. OSError.

    While that lasts the file is locked: `remove_left_behind` of another process leaves it alone.
    """
    temporary, handle = _created(target)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def remove_left_behind(target: Path) -> list[Path]:
    """What `replace_whole` has left beside `target` in processes that were killed. What cannot be looked at stays."""
    removed = []
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(target.name) and _SUFFIX.fullmatch(entry.name[len(target.name) :]):
                with suppress(OSError):
                    if _removed(entry.path):
                        removed.append(Path(entry.path))
    return removed


def _created(target: Path) -> tuple[Path, int]:
    """A file of our own, and its path. Between its creation and the lock somebody may take it for one that was left
    behind; where a file system has no locks nobody can."""
    while True:
        path = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return path, handle
        os.close(handle)


def _removed(path: str) -> bool:
    """Whether it was nobody's. A lock ends with the process that has it, however that ends."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(handle)
    return True
