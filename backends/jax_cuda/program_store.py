"""Compiled programs on disk, found without being traced: what determines one is its name.

JAX's own cache is asked with a program that is traced and lowered, which takes longer than reading it. Here a program
is found by everything that tracing and compiling go by: sources, versions, settings, device, static arguments, and the
kinds of its arrays (docs/adr/0023-programs-found-without-tracing.md). Whatever cannot be told is not kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs
import jax

from mlxcel_jax_cuda.compile_cache import make_private, program_folder
from mlxcel_jax_cuda.fingerprint import fingerprint, function_name
from mlxcel_jax_cuda.package_files import Unknown
from mlxcel_jax_cuda.program_facts import facts_of, kinds, settings
from mlxcel_jax_cuda.sources import all_unchanged

log = logging.getLogger("mlxcel.jax")

LIMIT: Final = 2 << 30
"""Bytes of a folder, beyond which those go that were not used for the longest time."""
_BEGINS: Final = b"mlxcel program 1\n"
_SUFFIX: Final = ".program"
_ABANDONED: Final = 3600.0
"""Seconds after which a file that somebody began to write belongs to nobody, and a refusal is asked for again."""


@attrs.define(eq=False)
class ProgramStore:
    """The programs of one device. Calls come from any thread."""

    folder: Path
    _device: jax.Device
    _facts: bytes
    _told: bool = False
    _loaded: bool = False
    _known: dict[int, tuple[Any, bytes]] = attrs.field(factory=dict)  # by id, with what keeps the id
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    @classmethod
    def of(cls, device: jax.Device) -> ProgramStore | None:
        """None where programs are not kept: there is no folder for them, or no certainty of what makes them."""
        folder = program_folder()
        if folder is None:
            return None
        try:
            make_private(folder)
            _remove_old(folder)
            store = cls(folder, device, fingerprint(facts_of(device)))
            if not store._refusal.exists():
                return store
            log.debug("programs are not kept: JAX refused one")
        except OSError as error:
            log.warning("programs are not kept: %s: %s", folder, error.strerror or error)
        except Unknown as error:
            log.info("programs are not kept: %s", error)
        return None

    def name(self, function: Any, statics: tuple[Any, ...], arrays: tuple[Any, ...]) -> str | None:
        """What a jitted function with such arguments is kept under; None where that cannot be told."""
        try:
            told = [fingerprint((function_name(function), settings()))]
            told += [self._of_static(static) for static in statics]
            told.append(fingerprint(list(kinds(arrays))))
        except Exception as error:  # NotPlain, or whatever a third party's object raises
            log.debug("%r is not kept: %s: %s", function, type(error).__name__, error)
            return None
        return hashlib.sha256(fingerprint([self._facts, *told])).hexdigest()

    def _of_static(self, static: Any) -> bytes:
        """Models are large, and the same for many programs."""
        held, told = self._known.get(id(static), (None, b""))
        if held is None:
            told = hashlib.sha256(fingerprint(static)).digest()
            self._known[id(static)] = static, told
        return told

    def load(self, name: str) -> Any | None:
        """The program, to be called with arrays alone. What is no program is removed, with one warning for all."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):  # in a folder that takes no changes
            os.utime(path)
        begins = _begins(name, data[len(_begins(name, b"")) :])
        try:
            if not data.startswith(begins):
                raise ValueError("it is not what was written")
            from jax.experimental.serialize_executable import deserialize_and_load

            packed, taken, given = pickle.loads(data[len(begins) :])
            loaded = deserialize_and_load(
                packed, taken, given, backend=self._device.client, execution_devices=[self._device]
            )
            self._loaded = True
            return loaded
        except Exception as error:
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._tell("a compiled program in %s is damaged, and made again: %s", self.folder, words)
            self.remove(name)
            return None

    def keep(self, name: str, compiled: Any) -> None:
        """A program that cannot be kept, or not with certainty, is compiled again the next time."""
        if not all_unchanged():
            log.debug("a program is not kept: sources have changed since this process began")
            return
        try:
            from jax.experimental.serialize_executable import serialize

            data = pickle.dumps(serialize(compiled))
        except Exception as error:
            log.debug("a program is not kept: %s: %s", type(error).__name__, error)
            # Once a program was loaded XLA:CPU refuses others of this process, which says nothing of the next one.
            data = b""
        try:
            if data:
                self._write(name, _begins(name, data) + data)
            elif not self._loaded:
                self._refusal.touch(0o600)
        except OSError as error:
            self._tell("programs are not kept: %s: %s", self.folder, error.strerror or error)

    @property
    def _refusal(self) -> Path:
        """There for an hour where JAX could not serialize a program of such a world: all are left to its cache then."""
        return self.folder / f"{hashlib.sha256(self._facts).hexdigest()}.refused"

    def _write(self, name: str, data: bytes) -> None:
        """Whole or not at all, however many write it."""
        number, path = tempfile.mkstemp(prefix=name, dir=self.folder)
        try:
            with open(number, "wb") as file:
                file.write(data)
            os.replace(path, self._path(name))
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> None:
        _unlink(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"

    def _tell(self, words: str, *about: object) -> None:
        """Once, of all that may befall programs: it seldom befalls one alone."""
        with self._lock:
            first, self._told = not self._told, True
        log.log(logging.WARNING if first else logging.DEBUG, words, *about)


def _begins(name: str, data: bytes) -> bytes:
    """What stands before the data of a program."""
    return _BEGINS + name.encode() + hashlib.sha256(data).digest()


def _remove_old(folder: Path) -> None:
    """Those that were not used for the longest time, as long as there is too much, and what was never finished."""
    found: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process was quicker
            continue
        if path.suffix == _SUFFIX:
            found.append((stat.st_mtime, stat.st_size, path))
        elif stat.st_mtime < time.time() - _ABANDONED:
            _unlink(path)
    _remove_beyond(found, LIMIT)


def _remove_beyond(found: Iterable[tuple[float, int, Path]], limit: int) -> None:
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > limit:
            _unlink(path)


def _unlink(path: Path) -> None:
    """Where that cannot be, it is met again by the next start."""
    with suppress(OSError):
        path.unlink()
