"""Replies that are sent as a whole: waited for to the end, and put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.requests import ClientDisconnect

from mlxcel.asked import own
from mlxcel.core.events import Ended
from mlxcel.core.result import RequestResult
from mlxcel.server.bridge import Replies
from mlxcel.server.json_out import Json

BIG: Final = 4096
"""Tokens and log-probabilities of a reply from which on others would wait while it is put together."""


async def results_of(replies: Replies, prompts: int) -> list[list[RequestResult]]:
    """Of the choices, prompt by prompt. The error of the first that failed is raised, once all have ended.

    ClientDisconnect when nobody waits for them any more.
    """
    found: list[dict[int, RequestResult]] = [{} for _ in range(prompts)]
    async for prompt, event in replies.events():
        if isinstance(event, Ended):
            found[prompt][event.choice] = event.result
            if event.result.error is not None or event.result.cause == "cancelled":
                replies.cancel()
    results = [[choices[index] for index in sorted(choices)] for choices in found]
    ended = [result for choices in results for result in choices]
    if (error := next((each.error for each in ended if each.error is not None), None)) is not None:
        raise own(error)
    if any(each.cause == "cancelled" for each in ended):
        raise ClientDisconnect
    return results


async def whole(make: Callable[[Sequence[Sequence[RequestResult]]], Any], results: list[list[RequestResult]]) -> Json:
    """What `make` makes of the results, as JSON; of big ones off the event loop."""
    if sum(_size(result) for choices in results for result in choices) < BIG:
        return Json(make(results))
    return await asyncio.to_thread(lambda: Json(make(results)))


def _size(result: RequestResult) -> int:
    scores = [score for score in (*result.logprobs, *result.prompt_logprobs) if score is not None]
    return len(result.token_ids) + sum(1 + len(score.top) for score in scores)
