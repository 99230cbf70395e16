"""The spec of one sequence, and the request that it is a choice of."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import numpy as np

from mlxcel.core.params import SamplingParams
from mlxcel.core.reasoning import ReasoningSplit
from mlxcel.errors import RequestError, shown

MAX_SALT = 256
"""Characters of a `cache_salt` (spec X5)."""


@attrs.frozen(eq=False)
class SequenceSpec:
    """One sequence, complete: nothing in it is left to a default.

    prompt_ids: int32 [P]. `params` has its seed drawn and comes from `bind_params` where it holds texts to be encoded.
    `eos_ids` is the set E of docs/spec/engine.md 5.2. `reasoning` is how the text is split; None: all of it is content.
    With `echo` the prompt stands in front of the reply: its text, and with `logprobs` its tokens. Rows share KV only
    with rows of the same `cache_salt`, of 1 to MAX_SALT characters, and `isolation` (spec X2, X5). `compared` is for
    tools: with it the log-probabilities of the reply, where there are any, are the scores that its draw compares, after
    the chain and, for a sampled row, with the noise.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    choice: int = 0
    reasoning: ReasoningSplit | None = None
    echo: bool = False
    cache_salt: str | None = None
    isolation: bytes | None = None
    compared: bool = False

    def __attrs_post_init__(self) -> None:
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT):
            raise RequestError(
                f"cache_salt is {shown(salt)}, it must be a text of 1 to {MAX_SALT} characters", field="cache_salt"
            )

    @property
    def prompt_scores(self) -> int | None:
        """How many best ids are wanted at each position of the prompt, -1 for all, None where it is not scored: for
        `prompt_logprobs`, and for `logprobs` with `echo`."""
        asked = [self.params.prompt_logprobs, self.params.logprobs if self.echo else None]
        wanted = [top for top in asked if top is not None]
        return None if not wanted else -1 if -1 in wanted else max(wanted)


LANES = {"high": 0, "normal": 1, "low": 2}
"""Priorities, first served first (spec C7)."""


@attrs.frozen(eq=False)
class Request:
    """What a client hands to the scheduler: the choices of one prompt, each a row of its own (spec C13).

    `lane` is one of LANES. `timeout` seconds are for all of it, the queue included; 0: no bound. Without `cache_prompt`
    the prompt cache is neither read nor filled. `progress`: the client hears how far its prompt is. `before` is text
    that stands before the reply of each choice (`echo`). `origin` and `warnings` of the parameters come back in the
    results.
    """

    choices: tuple[SequenceSpec, ...]
    lane: int = 1
    timeout: float = 0.0
    cache_prompt: bool = True
    progress: bool = False
    before: str = ""
    origin: Mapping[str, str] = attrs.field(factory=dict)
    warnings: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if not self.choices:
            raise ValueError("a request has at least one choice")
        first = self.choices[0]
        for place, choice in enumerate(self.choices):
            if choice.choice != place or choice.request_id != first.request_id:
                raise ValueError(
                    f"choice {place} of request {first.request_id!r} is choice {choice.choice} of {choice.request_id!r}"
                )
            if not np.array_equal(choice.prompt_ids, first.prompt_ids):
                raise ValueError(f"choice {place} of request {first.request_id!r} has another prompt")
        if self.lane not in LANES.values():
            raise RequestError(f"priority is {shown(self.lane)}, it must be 0, 1 or 2", field="priority")
        if not 0 <= self.timeout < math.inf:
            raise RequestError(f"timeout is {shown(self.timeout)}, it must be 0 or more seconds", field="timeout")

    @property
    def request_id(self) -> str:
        return self.choices[0].request_id
