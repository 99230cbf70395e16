"""One row's text, from ids to what a client may see: detokeniser, stop strings, indent bound, reasoning split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from mlxcel.core.finish import Released
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.finish.bounds import IndentBound
from mlxcel.plugins.finish.stop_strings import StopMatcher, StopStringTable
from mlxcel.text.held_text import HeldText, Run, shown_text
from mlxcel.text.reasoning import ReasoningParser


class TextStream(Protocol):
    """A row's detokeniser."""

    def push(self, token_id: int) -> str: ...

    def hidden(self, token_id: int) -> str: ...

    def settle(self) -> str: ...

    def flush(self) -> str: ...


@attrs.frozen
class Cut:
    """Where the text ends by a cause of its own: `detail` as in Ending, `at` in characters of the text that waits.

    The cause of a `hidden` cut is a special token: an unfinished character, without a place yet, is of tokens before.
    """

    detail: Any
    at: int
    hidden: bool


class ReplyText:
    """Characters wait here while they may become part of a stop string (spec F12). `push` adds a token and says what it
    means; then one of `release`, `finish` and `cut` says what leaves."""

    def __init__(self, spec: SequenceSpec, stream: TextStream, stops: StopStringTable) -> None:
        params = spec.params
        self.stream = stream
        self._stops = StopMatcher(stops.of(params.stop)) if params.stop else None
        self._keeps_stop = params.include_stop_str_in_output
        self._indent = IndentBound(params.n_indent) if params.n_indent else None
        self._split = ReasoningParser(spec.reasoning) if spec.reasoning is not None else None
        self.plain = self._stops is None and self._indent is None and self._split is None
        """Whether nothing is looked for: what `stream` makes of a token leaves as it is, past all that is here."""
        self._held = HeldText()
        self._before: tuple[Run, ...] = ()  # what waited before the newest token
        self._whole = True  # whether the detokeniser knows exactly the tokens that count
        self.stop: Cut | None = None
        self.indent: Cut | None = None

    def push(self, token: int, *, armed: bool) -> None:
        """Append a token. `stop` and `indent` say whether its characters end the row by a stop string, which they may
        only when `armed`, or by the indent bound."""
        self._before = self._held.runs
        hidden = "" if self.plain else self.stream.hidden(token)
        before = self.stream.settle() if hidden else ""
        runs = [Run(before, True), Run(self.stream.push(token), True), Run(hidden, False)]
        place = self._held.length
        self._held.add(runs)
        for run in runs:
            if self._stops is not None and self.stop is None and (match := self._stops.push(run.text, armed=armed)):
                at = place + match.end - (0 if self._keeps_stop else len(match.string))
                self.stop = Cut(match.string, at, not run.shown)
            if self._indent is not None and self.indent is None and (kept := self._indent.push(run.text)) is not None:
                self.indent = Cut(self._indent.blanks, place + kept, not run.shown)
            place += len(run.text)

    def release(self) -> list[Run]:
        """What no stop string can reach any more."""
        return self._held.take(self._held.length - (self._stops.held if self._stops is not None else 0))

    def finish(self) -> list[Run]:
        """All that waited, down to an unfinished character (spec F13)."""
        return [*self._held.take_all(), Run(self.stream.flush() if self._whole else "", True)]

    def forget_newest(self) -> None:
        """The newest token failed and does not count; none follows. The text waits that waited before it."""
        self._held, self._whole = HeldText(self._before), False

    def cut(self, cut: Cut) -> list[Run]:
        """What stands before a cut."""
        runs = self._held.take(cut.at)
        return [*runs, Run(self.stream.flush(), True)] if cut.hidden else runs

    def released(self, runs: Sequence[Run], *, last: bool) -> Released:
        """Split as the row asks for, hidden characters left out. The `last` runs of a row bring what still waited."""
        if self._split is None:
            return Released(shown_text(runs))
        released = self._split.push(runs)
        return released.then(self._split.flush()) if last else released
