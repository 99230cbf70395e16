"""Programs made side by side: loaded where they are kept, or compiled, for which they are traced and lowered one after
the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, Final

import attrs
import jax
import numpy as np

from mlxcel.core.held_interrupts import held_interrupts
from mlxcel.errors import BackendFault

MOST_THREADS: Final = 8
"""Each holds what XLA needs for a program: some hundred MB for the large ones."""

_ARRAYS: Final = (tuple, np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)


@attrs.frozen(eq=False)
class Program:
    """A jitted function with arguments of some shapes. `name` is for people."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    kept_as: str | None = None  # in a store of programs


def parts(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The static ones, and behind them the arrays: those that are arrays, or tuples of some."""
    count = next((place for place, each in enumerate(arguments) if isinstance(each, _ARRAYS)), len(arguments))
    return arguments[:count], arguments[count:]


def load_together(programs: Sequence[Program], load: Callable[[str], Any], done: Callable[[int], None]) -> list[Any]:
    """What `load` has for each program by the name that it is kept as, None for one that is not kept. `done` hears how
    many there are."""
    with _threads() as pool:
        loading = [pool.submit(load, each.kept_as) if each.kept_as else None for each in programs]
        found = []
        for future in loading:
            found.append(None if future is None else future.result())
            done(sum(each is not None for each in found))
    return found


def compile_together(
    programs: Iterable[Program],
    done: Callable[[int], None],
    keep: Callable[[str, Any], None] = lambda name, compiled: None,
) -> list[Any]:
    """Each program compiled, so that a call of its function finds it too; those that are kept as something go to `keep`
    on the way. `done` hears how many there are.

    XLA leaves the interpreter while it compiles; tracing does not: that and `done` stay on the thread of the call.
    BackendFault names the program that cannot be compiled. An interrupt begins no other program, and leaves those that
    are under way to themselves.
    """
    with _threads() as pool:
        futures: list[Future[Any]] = []
        for each in programs:
            futures.append(pool.submit(_compiled, each, _lowered(each), keep))
            done(_count(futures))
        for future in as_completed(futures):
            future.result()
            done(_count(futures))
    return [future.result() for future in futures]


def compile_aside(function: Any, arguments: tuple[Any, ...]) -> Any:
    """One program, on a thread of its own: whoever waits for it can be interrupted. Raises as JAX does."""
    with _threads() as pool:
        with held_interrupts():
            lowered = function.lower(*arguments)
        return pool.submit(lowered.compile).result()


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """What is raised inside waits for nothing: XLA cannot be interrupted."""
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="mlxcel-compile")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _count(futures: Sequence[Future[Any]]) -> int:
    return sum(future.done() for future in futures)


def _lowered(program: Program) -> Any:
    with _about(program), held_interrupts():
        return program.function.lower(*program.arguments)


def _compiled(program: Program, lowered: Any, keep: Callable[[str, Any], None]) -> Any:
    with _about(program):
        compiled = lowered.compile()
        if program.kept_as is not None:
            keep(program.kept_as, compiled)
        return compiled


@contextmanager
def _about(program: Program) -> Iterator[None]:
    """Errors say which program they are about."""
    try:
        yield
    except Exception as error:
        words = f"{type(error).__name__}: {error}".strip()
        raise BackendFault(f"program {program.name!r} cannot be compiled: {words}") from error
