"""The one finish step: the same function for the first token and every later one, of every client (spec 5.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from mlxcel.core.finish import Ending, FinishStep, Released, Resolution
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.finish.bounds import TimeBound
from mlxcel.plugins.finish.loop_detection import LoopDetector
from mlxcel.plugins.finish.reply_text import Cut, ReplyText, TextStream
from mlxcel.plugins.finish.stop_strings import StopStringTable
from mlxcel.text.held_text import Run, shown_text


@attrs.define
class FinishState:
    """What the finish step remembers of a row: a part of the row itself, whatever happens to its KV (spec F14)."""

    spec: SequenceSpec
    ends: frozenset[int]  # ids that end: those of E, and U
    stop_ids: frozenset[int]  # U
    min_tokens: int
    max_new: int
    budget_asked: bool  # whether the request, and not the context, set max_new
    context: int
    text: ReplyText
    time: TimeBound | None
    loop: LoopDetector | None
    steps: tuple[tuple[str, FinishStep, Any], ...]
    prompt_length: int
    plain: bool  # whether, behind the end ids, nothing but its length ends it, and its text goes out as it comes
    output: list[int] = attrs.field(factory=list)


class StandardFinish:
    """Order: stop ids, EOS, append, stop strings, time, indentation, max_tokens, context, the plugins' steps, loop. The
    first cause wins. `stream` makes a row's detokeniser; `clock` is read in seconds, by rows with a time bound."""

    def __init__(
        self,
        *,
        stream: Callable[[SequenceSpec], TextStream],
        steps: Mapping[str, FinishStep],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._steps = steps
        self._clock = clock
        self._stops = StopStringTable()

    def open(self, spec: SequenceSpec, *, max_new: int, context: int) -> FinishState:
        params = spec.params
        loop = params.loop_detection
        text = ReplyText(spec, self._stream(spec), self._stops)
        bound = TimeBound(params.t_max_predict_ms, self._clock) if params.t_max_predict_ms else None
        detector = LoopDetector(loop) if loop is not None and loop.on else None
        steps = tuple((name, step, step.open(spec)) for name, step in self._steps.items())
        stop_ids = frozenset(params.stop_token_ids)
        return FinishState(
            spec=spec,
            ends=stop_ids if params.ignore_eos else stop_ids | spec.eos_ids,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            max_new=max_new,
            budget_asked=params.max_tokens != -1 and params.max_tokens <= context - len(spec.prompt_ids),
            context=context,
            text=text,
            time=bound,
            loop=detector,
            steps=steps,
            prompt_length=len(spec.prompt_ids),
            plain=text.plain and bound is None and detector is None and not steps,
        )

    def resolve(self, state: FinishState, token: int) -> Resolution:
        output = state.output
        if token in state.ends and len(output) >= state.min_tokens:
            ending = Ending("stop_token", token) if token in state.stop_ids else Ending("eos")
            return Resolution(False, self.flush(state), ending)
        output.append(token)
        try:
            produced = len(output)
            if state.plain and produced < state.max_new and state.prompt_length + produced < state.context:
                return Resolution(True, Released(state.text.stream.push(token)), None)
            return self._appended(state, token)
        except Exception:
            state.output.pop()
            state.text.forget_newest()
            raise

    def _appended(self, state: FinishState, token: int) -> Resolution:
        text = state.text
        text.push(token, armed=len(state.output) > state.min_tokens)
        ending, cut = _bound(state)
        if ending is not None:
            runs = text.finish() if cut is None else text.cut(cut)
            return Resolution(True, text.released(runs, last=True), ending)
        runs = text.release()
        ending = _step(state, runs) or _loop(state, token)
        if ending is not None:
            runs += text.finish()
        return Resolution(True, text.released(runs, last=ending is not None), ending)

    def flush(self, state: FinishState) -> Released:
        return state.text.released(state.text.finish(), last=True)

    def pause(self, state: FinishState) -> None:
        if state.time is not None:
            state.time.pause()

    def resume(self, state: FinishState) -> None:
        if state.time is not None:
            state.time.resume()


def _bound(state: FinishState) -> tuple[Ending | None, Cut | None]:
    """What the appended token ends by itself, and where the text is cut for it."""
    text, produced = state.text, len(state.output)
    timed_out = state.time is not None and state.time.passed()
    if text.stop is not None:
        return Ending("stop_string", text.stop.detail), text.stop
    if timed_out:
        return Ending("time_limit"), None
    if text.indent is not None:
        return Ending("indent_limit", text.indent.detail), text.indent
    if state.budget_asked and produced >= state.max_new:
        return Ending("max_tokens"), None
    if state.prompt_length + produced >= state.context:
        return Ending("context"), None
    return None, None


def _step(state: FinishState, runs: Sequence[Run]) -> Ending | None:
    released = shown_text(runs)
    for name, step, memory in state.steps:
        detail = step.check(memory, state.output, released)
        if detail is not None:
            return Ending(name, detail)
    return None


def _loop(state: FinishState, token: int) -> Ending | None:
    period = state.loop.push(token) if state.loop is not None else None
    if period is None or state.spec.params.loop_detection is None:
        return None
    return Ending("loop", {"period": period, "count": state.spec.params.loop_detection.min_count})
