"""The programs of an engine that runs, by function and static arguments: made ahead, or when one is first called."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import jax

from mlxcel.core.held_interrupts import held_interrupts
from mlxcel.core.source import Progress
from mlxcel_jax_cuda.compile_ahead import Program, compile_aside, compile_together, load_together, parts
from mlxcel_jax_cuda.compile_cache import unasked
from mlxcel_jax_cuda.program_store import ProgramStore

log = logging.getLogger("mlxcel.jax")

_Key = tuple[Any, tuple[Any, ...]]


@attrs.define(eq=False)
class Executables:
    """Of one engine, whose static arguments say all about the shapes of its arrays. Programs that are not kept in a
    store are JAX's own affair: it finds them again in its memory or in its cache."""

    _store: ProgramStore | None = None
    _ready: dict[_Key, Callable[..., Any]] = attrs.field(factory=dict)
    _unproven: dict[_Key, str] = attrs.field(factory=dict)
    """Programs that were loaded ahead and did not run yet, with what they are kept as."""
    _at_hand: dict[_Key, Callable[..., Any]] = attrs.field(factory=dict)
    """Programs that were loaded for a call that has not come yet, and is the first to run them."""

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """`function(*arguments)`, by its program."""
        statics, arrays = parts(arguments)
        ready = self._ready.get((function, statics))
        return self._call_first(function, arguments) if ready is None else ready(*arrays)

    def make(self, programs: Iterable[Program], done: Callable[[int], None]) -> None:
        """All of them, ahead; `done` hears how many there are."""
        named = [attrs.evolve(each, kept_as=self._kept_as(each.function, each.arguments)) for each in programs]
        found = [None] * len(named) if self._store is None else load_together(named, self._store.load, done)
        missing = []
        for each, call in zip(named, found, strict=True):
            if call is not None and each.kept_as is not None:
                self._ready[_key(each)] = call
                self._unproven[_key(each)] = each.kept_as
            else:
                missing.append(each)
        there = len(named) - len(missing)
        kept = self._compile_all(missing, lambda count: done(there + count))
        others = len(missing) - kept
        log.info("programs: %d loaded, %d compiled, %d left to JAX's own cache", there, kept, others)

    def make_missing(self, programs: Iterable[Program], progress: Progress) -> None:
        """Those of them that are not there, each once, ahead of calls that will come. What no store has is compiled, as
        the phase "compile"; a call does not have to find any of it."""
        wanted = {_key(each): each for each in programs}
        missing = {key: each for key, each in wanted.items() if key not in self._ready and key not in self._at_hand}
        named = [attrs.evolve(each, kept_as=self._kept_as(each.function, each.arguments)) for each in missing.values()]
        if self._store is not None:
            found = load_together(named, self._store.load, lambda count: None)
            self._at_hand |= {key: call for key, call in zip(missing, found, strict=True) if call is not None}
            named = [each for each, call in zip(named, found, strict=True) if call is None]
        if named:
            progress.start("compile", len(named), "programs")
            self._compile_all(named, progress.advance)
            progress.finish()
        log.info("programs of steps to come: %d loaded, %d compiled", len(missing) - len(named), len(named))

    def proven(self) -> None:
        """Every program that is there has run."""
        self._unproven.clear()

    def doubt(self) -> bool:
        """Something failed: what was loaded ahead and did not run yet is forgotten, and made anew. Whether there was
        any."""
        doubted = bool(self._unproven)
        for key, kept_as in self._unproven.items():
            del self._ready[key]
            if self._store is not None:
                self._store.remove(kept_as)
        self._unproven.clear()
        return doubted

    def _call_first(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """With a program that was not made ahead. One that is loaded and does not run is made anew the next time."""
        statics, arrays = parts(arguments)
        kept_as = self._kept_as(function, arguments)
        ready: Callable[..., Any]
        if self._store is None or kept_as is None:
            ready = functools.partial(function, *statics)
        elif found := self._loaded(function, statics, kept_as):
            try:
                given = jax.block_until_ready(found(*arrays))  # type: ignore[no-untyped-call]
            except Exception:
                self._store.remove(kept_as)
                raise
            self._ready[function, statics] = found
            return given
        else:
            log.info("program %s: compiled on demand", _told(function, statics))
            with unasked():
                ready = compile_aside(function, arguments)
            self._store.keep(kept_as, ready)
        self._ready[function, statics] = ready
        with held_interrupts():  # JAX may trace it now
            return ready(*arrays)

    def _loaded(self, function: Any, statics: tuple[Any, ...], kept_as: str) -> Callable[..., Any] | None:
        """Out of the store, now or before; None where it has no such program."""
        ahead = self._at_hand.pop((function, statics), None)
        if ahead is not None or self._store is None:
            return ahead
        found: Callable[..., Any] | None = self._store.load(kept_as)
        if found is not None:
            log.info("program %s: loaded on demand", _told(function, statics))
        return found

    def _compile_all(self, programs: Sequence[Program], done: Callable[[int], None]) -> int:
        """Those that are kept, and then the others; how many the former are."""
        kept = [each for each in programs if each.kept_as is not None]
        self._compile(kept, done)
        self._compile([each for each in programs if each.kept_as is None], lambda count: done(len(kept) + count))
        return len(kept)

    def _compile(self, programs: Sequence[Program], done: Callable[[int], None]) -> None:
        """Programs that are all kept, or all not."""
        if not programs:
            return
        if programs[0].kept_as is None or self._store is None:
            compiled = compile_together(programs, done)
        else:
            with unasked():
                compiled = compile_together(programs, done, self._store.keep)
        self._ready.update(zip(map(_key, programs), compiled, strict=True))

    def _kept_as(self, function: Any, arguments: tuple[Any, ...]) -> str | None:
        return None if self._store is None else self._store.name(function, *parts(arguments))


def _told(function: Any, statics: tuple[Any, ...]) -> str:
    """For people: the function, and the shapes that tell this program of it from its others."""
    shapes = ", ".join(each.words for each in statics if hasattr(each, "words"))
    return f"{function.__qualname__.lstrip('_')}{f' ({shapes})' if shapes else ''}"


def _key(program: Program) -> _Key:
    return program.function, parts(program.arguments)[0]
