"""Requests that share the steps of the one under test: other lengths, other sampling, other moments to come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np

from mlxcel.core.bind_params import Caps
from mlxcel.core.events import Delta, Event
from mlxcel.core.params import SamplingParams
from mlxcel.core.reply import Reply
from mlxcel.core.request import Request
from mlxcel.errors import EngineUnhealthy
from mlxcel.load import LoadedModel
from mlxcel.prepare import Prompt, sequence_spec
from mlxcel.serve_engine import Serving


@attrs.frozen(eq=False)
class Companion:
    """One of the crowd. It is submitted once the request under test has `joins` tokens, 0: before that one is. Under
    `salt` it may find KV of others."""

    prompt: np.ndarray  # int32 [P']
    params: SamplingParams
    joins: int
    salt: str | None = None


def companions(prompt: np.ndarray, count: int, max_tokens: int, seed: int) -> list[Companion]:
    """`count` of them, for a request of these ids int32 [P] and that many tokens. The first is there before it and
    stays to its end; the others come while it decodes, and some leave before it does."""
    made = []
    for place in range(count):
        length = max(1, (len(prompt) * (2 * place + 3) // (2 * count + 4) + 7 * place) % len(prompt))
        sampled: dict[str, Any] = {"temperature": 0.6 + 0.2 * (place % 4), "top_p": 0.9, "seed": seed + place + 1}
        values: dict[str, Any] = {"temperature": 0.0, "frequency_penalty": 0.5} if place % 3 == 1 else sampled
        stays = -1 if place == 0 else 1 + max_tokens * (place % 3 + 1) // 3
        made.append(
            Companion(
                np.roll(prompt, place + 1)[:length],
                SamplingParams(**values, max_tokens=stays, ignore_eos=True, reasoning_format="none"),
                place * max_tokens // (2 * count),
            )
        )
    return made


def rival(prompt: np.ndarray, shared: int, vocab: int, salt: str | None) -> Companion:
    """Finds the `shared` first tokens of a prompt, int32 [P], as the request under test does, and goes on otherwise:
    what it writes must not be seen by that one."""
    ids = prompt.copy()
    ids[shared:] = (ids[shared:] + 1) % vocab
    params = SamplingParams(temperature=0.0, max_tokens=-1, ignore_eos=True, reasoning_format="none")
    return Companion(ids, params, joins=1, salt=salt)


class Crowd:
    """Companions on their way through a scheduler."""

    def __init__(self, serving: Serving, waiting: list[Companion]) -> None:
        self._serving, self._waiting = serving, waiting
        self._replies: list[Reply] = []

    @classmethod
    @contextmanager
    def around(cls, serving: Serving, members: list[Companion]) -> Iterator[Crowd]:
        """Those that come first have begun to decode; whoever is left at the end is cancelled, and gone when this is
        over. Raises the error of one that failed."""
        crowd = cls(serving, list(members))
        try:
            crowd.join(0)
            for reply in crowd._replies:
                crowd._wait_for_a_token(reply)
            yield crowd
        finally:
            for reply in crowd._replies:
                reply.cancel()
            ended = [result for reply in crowd._replies for result in reply.results()]
        if failed := [result.error for result in ended if result.error is not None]:
            raise failed[0]

    def join(self, tokens: int) -> None:
        """Submit those that come by the moment at which the request under test has so many tokens."""
        while self._waiting and self._waiting[0].joins <= tokens:
            member = self._waiting.pop(0)
            self._replies.append(self._serving.scheduler.submit(_request(self._serving.model, member)))

    def _wait_for_a_token(self, reply: Reply) -> None:
        event: Event | None = reply.get()
        while event is not None and not isinstance(event, Delta):
            event = reply.get()
        if event is None:
            raise EngineUnhealthy("a request beside the one under test ended before it had a token", hint="run with -v")


def _request(model: LoadedModel, member: Companion) -> Request:
    prompt = Prompt(tuple(member.prompt.tolist()))
    spec = sequence_spec(model, prompt, member.params, request_id="beside", caps=Caps(max_n=1))
    return Request((attrs.evolve(spec, cache_salt=member.salt),))
