"""Fetching and removing, one process at a time for a model, and nothing left when one dies."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxcel.core.source import Progress
from mlxcel.store.lock import try_lock, wait_lock


@contextmanager
def working_on(root: Path, name: str, progress: Progress) -> Iterator[Path]:
    """A fresh empty folder on the store's disk, with the lock of `name` held; the folder is gone afterwards.

    `root` must be there. Raises OSError. Where another process is at work on `name` this waits, as the phase "wait".
    """
    locks, temporaries = root / ".locks", root / ".tmp"
    locks.mkdir(exist_ok=True)
    temporaries.mkdir(exist_ok=True)
    lock = try_lock(locks / name, create=True)
    if lock is None:
        progress.start("wait", None, "")
        try:
            lock = wait_lock(locks / name, create=True)
        finally:
            progress.finish()
    with lock:
        _sweep(temporaries, locks, held=name)
        mine = temporaries / name
        mine.mkdir(exist_ok=True)
        try:
            yield Path(tempfile.mkdtemp(dir=mine))
        finally:
            shutil.rmtree(mine, ignore_errors=True)


def _sweep(temporaries: Path, locks: Path, *, held: str) -> None:
    """Deletes what died processes have left: whose lock can be had, nobody is at work on."""
    for left in temporaries.iterdir():
        if left.name == held:
            shutil.rmtree(left, ignore_errors=True)
        elif (lock := try_lock(locks / left.name, create=True)) is not None:
            with lock:
                shutil.rmtree(left, ignore_errors=True)
