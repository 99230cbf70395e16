"""The one finish step: the same function for the first token and every later one, of every client (spec 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from mlxcel.core.finish import Ending, FinishStep, Resolution
from mlxcel.core.request import SequenceSpec


class TextStream(Protocol):
    """A row's detokeniser."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@attrs.define
class FinishState:
    """What the finish step remembers of a row."""

    spec: SequenceSpec
    stop_ids: frozenset[int]
    max_new: int
    budget_asked: bool  # whether the request, and not the context, set max_new
    context: int
    stream: TextStream
    steps: tuple[tuple[str, FinishStep, Any], ...]
    output: list[int] = attrs.field(factory=list)


class StandardFinish:
    """Order: stop ids, EOS, append, max_tokens, context, the plugins' steps. The first cause wins."""

    def __init__(self, *, stream: Callable[[SequenceSpec], TextStream], steps: Mapping[str, FinishStep]) -> None:
        self._stream = stream
        self._steps = steps

    def open(self, spec: SequenceSpec, *, max_new: int, context: int) -> FinishState:
        asked = spec.params.max_tokens
        return FinishState(
            spec=spec,
            stop_ids=frozenset(spec.params.stop_token_ids),
            max_new=max_new,
            budget_asked=asked != -1 and asked <= context - len(spec.prompt_ids),
            context=context,
            stream=self._stream(spec),
            steps=tuple((name, step, step.open(spec)) for name, step in self._steps.items()),
        )

    def resolve(self, state: FinishState, token: int) -> Resolution:
        if token in state.stop_ids:
            return Resolution(False, state.stream.flush(), Ending("stop_token", token))
        if token in state.spec.eos_ids:
            return Resolution(False, state.stream.flush(), Ending("eos"))
        text = state.stream.push(token)
        state.output.append(token)
        ending = self._ending(state, text)
        if ending is not None:
            text += state.stream.flush()
        return Resolution(True, text, ending)

    def flush(self, state: FinishState) -> str:
        return state.stream.flush()

    def _ending(self, state: FinishState, text: str) -> Ending | None:
        produced = len(state.output)
        if state.budget_asked and produced >= state.max_new:
            return Ending("max_tokens")
        if len(state.spec.prompt_ids) + produced >= state.context:
            return Ending("context")
        for name, step, memory in state.steps:
            detail = step.check(memory, state.output, text)
            if detail is not None:
                return Ending(name, detail)
        return None
