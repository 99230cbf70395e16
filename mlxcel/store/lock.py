"""Advisory locks between processes, by flock(2): Linux and macOS, released by the kernel when a process dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import attrs


@attrs.define(eq=False)
class FileLock:
    """A lock that is held until `close()`. Two locks of one process exclude each other as those of two processes do."""

    path: Path
    _descriptor: int

    def close(self) -> None:
        """Gives the lock back; harmless the second time."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_lock(path: Path, *, shared: bool = False, create: bool = False) -> FileLock | None:
    """The lock, or None where somebody holds one that excludes it. Raises OSError as open(2) does."""
    return _lock(path, shared=shared, create=create, wait=False)


def wait_lock(path: Path, *, shared: bool = False, create: bool = False) -> FileLock:
    """The lock, once it can be had. Ctrl-C ends the waiting."""
    lock = _lock(path, shared=shared, create=create, wait=True)
    assert lock is not None
    return lock


def _lock(path: Path, *, shared: bool, create: bool, wait: bool) -> FileLock | None:
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    # A lock needs no right to write, and a shared store may be read-only for those who use it.
    descriptor = os.open(path, (os.O_RDWR | os.O_CREAT if create else os.O_RDONLY) | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return FileLock(path, descriptor)


def still_there(lock: FileLock) -> bool:
    """Whether the locked file is the one its path names now. A file replaced while one waited locks nothing."""
    try:
        return os.path.samestat(os.fstat(lock._descriptor), lock.path.stat())
    except FileNotFoundError:
        return False
