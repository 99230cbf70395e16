"""Programs compiled side by side: traced and lowered one after the other, compiled on a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, Final

import attrs

from mlxcel.errors import BackendFault

MOST_THREADS: Final = 8
"""Each holds what XLA needs for a program: some hundred MB for the large ones."""


@attrs.frozen(eq=False)
class Program:
    """A jitted function with arguments of some shapes. `name` is for people."""

    name: str
    function: Any
    arguments: tuple[Any, ...]


def compile_together(programs: Iterable[Program], compiled: Callable[[int], None]) -> None:
    """Compile each program, so that a call of its function finds it. `compiled` hears how many are done.

    XLA leaves the interpreter while it compiles; tracing does not: that and `compiled` stay on the thread of the call.
    BackendFault names the program that cannot be compiled. An interrupt ends with the programs that are under way, and
    begins no other.
    """
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="mlxcel-compile") as pool:
        try:
            futures: list[Future[None]] = []
            for each in programs:
                futures.append(pool.submit(_compile, each, _lowered(each)))
                compiled(_done(futures))
            for future in as_completed(futures):
                future.result()
                compiled(_done(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _done(futures: Sequence[Future[None]]) -> int:
    return sum(future.done() for future in futures)


def _lowered(program: Program) -> Any:
    with _about(program):
        return program.function.lower(*program.arguments)


def _compile(program: Program, lowered: Any) -> None:
    """What comes of it is kept by JAX."""
    with _about(program):
        lowered.compile()


@contextmanager
def _about(program: Program) -> Iterator[None]:
    """Errors say which program they are about."""
    try:
        yield
    except Exception as error:
        words = f"{type(error).__name__}: {error}".strip()
        raise BackendFault(f"program {program.name!r} cannot be compiled: {words}") from error
