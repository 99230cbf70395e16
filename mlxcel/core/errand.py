"""Work that belongs to no request and still needs the engine's thread: a look at the KV, a reset of the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Errand:
    """`work` is called once, by whichever thread runs it first; `result` then gives what it returned, or raises what it
    raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, timeout: float) -> bool:
        """Whether it was run, waited for."""
        return self._done.wait(timeout)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value
