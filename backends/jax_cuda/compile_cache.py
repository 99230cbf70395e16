"""Compiled programs from one run to the next. They are code that will be executed: the folder is this user's alone."""

from __future__ import annotations

import functools
import logging
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import jax
from jax.experimental.compilation_cache import compilation_cache

log = logging.getLogger("mlxcel.jax")

_FOLDER: Final = "jax_compilation_cache_dir"
_KEEP_ALL: Final = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,  # 0 would let JAX put a least size of its own
}
_ENABLED: Final = "jax_enable_compilation_cache"
_PROGRAMS: Final = "programs"
_ENTRIES: Final = "*-cache"
_UNREADABLE: Final = "Error reading persistent compilation cache entry"


def use_cache(folder: Path | None) -> None:
    """Let JAX keep every program in a folder below this one, named after its version. One that the user has given to
    JAX stays; a folder that cannot be made, or that somebody else owns, is a warning, and then nothing is kept."""
    if folder is None or folder_in_use() is not None:
        return
    own = folder / f"jax-{jax.__version__}"
    try:
        make_private(own)
        make_private(own / _PROGRAMS)
    except OSError as error:
        log.warning("compiled programs are not kept: %s: %s", own, error.strerror or error)
        return
    for name, value in {_FOLDER: str(own), **_KEEP_ALL}.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def folder_in_use() -> Path | None:
    """Where JAX keeps programs in this process."""
    folder: str | None = jax.config.values[_FOLDER]
    return None if folder is None else Path(folder)


def program_folder() -> Path | None:
    """Where whole programs are kept in this process (program_store.py): beside JAX's own, where that folder is ours."""
    folder = folder_in_use()
    return folder / _PROGRAMS if folder is not None and (folder / _PROGRAMS).is_dir() else None


@attrs.define
class _Unasked:
    """Whoever wants JAX's cache not to be asked, in the whole process."""

    count: int = 0
    before: bool = True  # whether it was asked without them
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def come(self) -> None:
        with self.lock:
            self.count += 1
            if self.count == 1:
                self.before = jax.config.values[_ENABLED]
                self._ask(False)

    def go(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                self._ask(self.before)

    def _ask(self, value: bool) -> None:
        jax.config.update(_ENABLED, value)  # type: ignore[no-untyped-call]
        compilation_cache.reset_cache()  # which keeps the value that it read first


@functools.cache
def _unasked() -> _Unasked:
    return _Unasked()


@contextmanager
def unasked() -> Iterator[None]:
    """Around compiling what is kept as a whole. JAX gives out programs of its cache that cannot be kept again: on a CPU
    they lack some of their functions, and fail when they run."""
    _unasked().come()
    try:
        yield
    finally:
        _unasked().go()


def make_private(folder: Path) -> None:
    """The folder, made where it is not there, with no right for anybody but its owner. OSError for one that is not this
    user's own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(1, f"it belongs to user {found.st_uid}, this is user {os.geteuid()}")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


@contextmanager
def mended() -> Iterator[None]:
    """Around whatever compiles: entries that cannot be read are deleted afterwards.

    JAX compiles what it cannot read, with a warning, and leaves the entry: without this each start would meet it again.
    A program that is ended while it writes leaves such an entry.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    unreadable = [warning for warning in told if str(warning.message).startswith(_UNREADABLE)]
    for warning in told:
        if warning not in unreadable:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    folder = folder_in_use()
    if unreadable and folder is not None:
        log.warning("%d compiled programs in %s are damaged: the folder is emptied", len(unreadable), folder)
        for entry in folder.glob(_ENTRIES):
            entry.unlink(missing_ok=True)
