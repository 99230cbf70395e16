"""How a row ends: the records of an ending, and the protocol of a plugin's finish step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from mlxcel.core.request import SequenceSpec


@attrs.frozen
class Ending:
    """Why a row ended: a cause of docs/spec/engine.md 5.1 or a plugin's registered name, and its detail as plain data.

    That is the stop id, the stop string, the blanks before the line of an `indent_limit`, `{"period", "count"}`
    of a loop, a plugin's own value; None for the other causes.
    """

    cause: str
    detail: Any = None


@attrs.frozen(slots=False)  # made for each token: without slots that takes two thirds of the time
class Released:
    """Text that a client may see, final. `text` is the reply's content, `reasoning` what was split off it."""

    text: str = ""
    reasoning: str = ""

    def then(self, later: Released) -> Released:
        return Released(self.text + later.text, self.reasoning + later.reasoning)


@attrs.frozen(slots=False)  # as Released
class Resolution:
    """What the finish step made of one drawn token."""

    appended: bool
    released: Released  # by this token; with an ending, the tail as well
    ending: Ending | None


@runtime_checkable
class FinishStep(Protocol):
    """A plugin's rule, run after `context` and before `loop`, in registered order; its cause is its registered name."""

    def open(self, spec: SequenceSpec) -> Any:
        """A row's state."""
        ...

    def check(self, state: Any, output: Sequence[int], text: str) -> Any | None:
        """Called with the ids appended so far, the newest last, and the text the newest one released, reasoning and its
        markers included. None goes on; anything else ends the row and is the ending's detail."""
        ...


class Finish(Protocol):
    """The one finish step of an engine: called for the first token and every later one."""

    def open(self, spec: SequenceSpec, *, max_new: int, context: int) -> Any:
        """A row's state; `max_new` and `context` are its bounds (spec F4, F5)."""
        ...

    def resolve(self, state: Any, token: int) -> Resolution:
        """Append or not, cause or none (spec 5.1). Raising fails the row alone; `flush` then gives what waited of the
        tokens before."""
        ...

    def flush(self, state: Any) -> Released:
        """The tail of a row that is ended from outside, or that failed."""
        ...

    def pause(self, state: Any) -> None:
        """The row lost its KV: time does not count against it until `resume` (spec F15)."""
        ...

    def resume(self, state: Any) -> None:
        """The row stands where it stood. Called for rows that were not paused too."""
        ...
