"""A request to a server as it is known before it is sent, and what comes back of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.core.params import SamplingParams
from mlxcel.outputs import Logprob, Logprobs


@attrs.frozen(eq=False)
class RemoteRequest:
    """A body for a route. `prompt` is the text of the prompt, None where ids were given; `prompt_ids` are those that
    the server will feed unless it cuts them."""

    route: str
    body: Mapping[str, Any]
    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def choices(self) -> int:
        return self.params.n


@attrs.frozen
class Piece:
    """What came of a choice."""

    choice: int
    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()


@attrs.frozen
class Finish:
    """How a choice ended: as the server says, or with `error` because nothing more comes."""

    choice: int
    cause: str
    reason: str | None = None
    stop_reason: Any = None
    error: Exception | None = None


@attrs.frozen
class About:
    """Facts of the whole reply, by the server's names, as far as they are known."""

    facts: Mapping[str, Any]


Came = Piece | Finish | About


def scored(entries: list[Mapping[str, Mapping[str, Any]] | None]) -> tuple[Logprobs | None, ...]:
    """`by_id` or `prompt_logprobs` of a reply."""
    return tuple(
        None if entry is None else {int(token): Logprob(**value) for token, value in entry.items()} for entry in entries
    )
