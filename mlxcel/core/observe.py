"""Plugins that watch. They never change or fail a row (spec E16)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # plugins import this module to register: no numpy
    from mlxcel.core.plan import StepReport

log = logging.getLogger("mlxcel.observers")


class Observer(Protocol):
    """Told of every step and every ended request, after the fact."""

    def step_finished(self, report: StepReport) -> None: ...

    def request_finished(self, result: Any) -> None:
        """`result` is a RequestResult (mlxcel.core.result)."""
        ...


class Observers:
    """All observers of an engine. What one raises is counted, and logged the first time."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self.failures: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """Whether there is anyone to tell."""
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        """One more, from now on. From any thread."""
        self._observers = (*self._observers, observer)

    def step_finished(self, report: StepReport) -> None:
        self._tell(lambda observer: observer.step_finished(report))

    def request_finished(self, result: Any) -> None:
        self._tell(lambda observer: observer.request_finished(result))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except (Exception, SystemExit) as error:
                name = type(observer).__qualname__
                self.failures[name] += 1
                if self.failures[name] == 1:
                    log.warning("observer %s raised; further faults of it are only counted", name, exc_info=error)
