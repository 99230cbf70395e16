"""What the Python API gives back, as plain data (docs/spec/clients.md 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams


@attrs.frozen
class Logprob:
    """Of one token at one place. `rank` counts from 1, the likeliest; None for a token that is not among the listed
    ones. `decoded_token` is its text alone, U+FFFD for bytes that are no whole character."""

    logprob: float
    rank: int | None = None
    decoded_token: str = ""


Logprobs = Mapping[int, Logprob]
"""Of one place, by token id: the token that stands there first, then the best ones, best first."""


@attrs.frozen
class CompletionOutput:
    """One choice, as far as it came. Causes are those of docs/spec/clients.md 0.4; None while the choice runs.

    `token_ids` has no EOS. `reasoning_content` is None where nothing was split off the text. `logprobs`, one entry a
    token, and their sum are None where they were not asked for. `stop_reason` is the stop string, the stop id, or
    `{"period", "count"}` of a loop.
    """

    index: int
    text: str = ""
    reasoning_content: str | None = None
    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    finish_reason: str | None = None
    finish_cause: str | None = None
    stop_reason: Any = None


@attrs.frozen
class RequestOutput:
    """A prompt and its choices.

    `prompt` is its text, of a conversation the rendered one, None where ids were given; `prompt_token_ids` are the ids
    that were fed. `prompt_logprobs` has one entry a prompt id, None for the first; it is None if not asked for.
    `metrics` are the timings of docs/spec/clients.md 0.5 and those of the first choice, None while it runs. `error`
    says why a choice failed, or why the request could not run. `sampling_params` are the values that were in force,
    with the seed that was drawn.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    outputs: tuple[CompletionOutput, ...] = ()
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    error: Exception | None = None
    sampling_params: SamplingParams | None = None


@attrs.frozen
class StreamDelta:
    """What came of choice `index` since its last delta. The texts of all deltas together are the choice's text.

    The last delta of a choice has no text, and says how it ended. `output` is the whole RequestOutput, on the last
    delta of all.
    """

    index: int
    text: str = ""
    reasoning_content: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] | None = None
    finish_reason: str | None = None
    finish_cause: str | None = None
    output: RequestOutput | None = None
