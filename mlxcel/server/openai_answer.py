"""Requests of OpenAI's kind from end to end: whole replies and streams, for chats and for plain prompts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from starlette.requests import Request
from starlette.responses import Response

from mlxcel.core.events import Delta, Ended, Started
from mlxcel.core.prompt_ids import truncate_prompt
from mlxcel.core.result import RequestResult
from mlxcel.server.asking import ping_of
from mlxcel.server.bridge import Replies, hang_up
from mlxcel.server.openai_choice import ChatChoice, TextChoice
from mlxcel.server.openai_reply import Head, Usage, usage_of
from mlxcel.server.prompt_progress import PromptProgress
from mlxcel.server.results import results_of, whole
from mlxcel.server.sse import DONE, PAUSE, EventStream, data
from mlxcel.server.stream_faults import told

if TYPE_CHECKING:
    from mlxcel.gather import Prepared
    from mlxcel.server.fields import Generating
    from mlxcel.server.record import RequestRecord
    from mlxcel.server.served import ServedModel
    from mlxcel.server.state import ServerState


@attrs.frozen
class Kind:
    """What the two routes differ in."""

    prefix: str
    whole: str
    chunk: str
    choice: type[ChatChoice] | type[TextChoice]


async def answer(
    request: Request, body: Generating, kind: Kind, served: ServedModel, prepared: Sequence[Prepared]
) -> Response | EventStream:
    """The reply to what was prepared. Raises what refuses it, or what a row of it failed with."""
    state: ServerState = request.app.state.server
    record: RequestRecord = request.state.record
    head = Head(
        id=f"{kind.prefix}-{body.request_id or record.id}",
        object=kind.chunk if body.stream else kind.whole,
        created=int(time.time()),
        model=served.named(body.model),
        fingerprint=served.fingerprint,
    )
    reply = _Told(kind, head, served, prepared, body)
    replies = Replies(served, prepared)
    if body.stream:
        ping = ping_of(body, state.settings)
        return EventStream(reply.frames(replies, record.id), ping, leave=replies.cancel)
    async with hang_up(request.receive, replies.cancel):
        results = await results_of(replies, len(prepared))
    return await whole(reply.whole, results)


class _Told:
    """One reply in the words of its route."""

    def __init__(
        self, kind: Kind, head: Head, served: ServedModel, prepared: Sequence[Prepared], body: Generating
    ) -> None:
        self._head, self._body, self._tokenizer = head, body, served.tokenizer
        self._chat = kind.choice is ChatChoice
        self._n = prepared[0].choices
        self._prompts = [truncate_prompt(each.request.choices[0], served.context)[0].prompt_ids for each in prepared]
        self._choices = [
            kind.choice(prompt * self._n + spec.choice, spec, served.tokenizer, ids=body.return_token_ids)
            for prompt, each in enumerate(prepared)
            for spec in each.request.choices
        ]
        found = dict.fromkeys(warning for each in prepared for warning in each.request.warnings)
        self._warnings = {"warnings": list(found)} if found else {}

    def whole(self, results: Sequence[Sequence[RequestResult]]) -> dict[str, Any]:
        flat = [result for each in results for result in each]
        choices = [choice.whole(result) for choice, result in zip(self._choices, flat, strict=True)]
        more = {**self._of_prompt(), **self._scores(flat[0]), **self._warnings}
        return self._head.around(choices, usage=usage_of(results, self._tokenizer), **more)

    async def frames(self, replies: Replies, request_id: str) -> AsyncGenerator[bytes, None]:
        """The chunks. A fault is told in the shape of the route, and is the last that is heard."""
        options = self._body.stream_options
        wanted = options is not None and bool(options.include_usage)
        running = wanted and options is not None and bool(options.continuous_usage_stats)
        usage = Usage(self._tokenizer)
        for ids in self._prompts:
            usage.prompt(len(ids))
        begun = False

        def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
            nonlocal begun
            if wanted:
                more = {"usage": usage.report() if running else None, **more}
            if choices and not begun:
                begun = True
                more = {**more, **self._of_prompt(), **self._warnings}
            return data(self._head.around(choices, **more))

        progress = PromptProgress([len(ids) for ids in self._prompts]) if self._body.return_progress else None
        try:
            async for heard in replies.as_they_come():
                if heard is None:
                    yield PAUSE
                    continue
                prompt, event = heard
                choice = self._choices[prompt * self._n + event.choice]
                if progress is not None and (done := progress.heard(prompt, event)) is not None:
                    yield chunk([], prompt_progress=done)
                if isinstance(event, Started):
                    usage.cached(event.cached_tokens if event.choice == 0 else 0)
                elif isinstance(event, Delta):
                    usage.drawn(len(event.token_ids))
                    if (part := choice.take(event)) is not None:
                        yield chunk([part])
                elif not isinstance(event, Ended):
                    continue
                elif event.result.error is not None:
                    raise event.result.error
                elif event.result.cause == "cancelled":
                    return
                else:
                    usage.ended(event.result, first=event.choice == 0)
                    *parts, last = choice.end(event.result)
                    for part in parts:
                        yield chunk([part])
                    yield chunk([last], **(self._scores(event.result) if event.choice == 0 else {}))
        except Exception as error:
            replies.cancel()
            yield data(told(error, "openai", request_id))
            return
        if wanted:
            yield chunk([], usage=usage.report())
        yield DONE

    def _of_prompt(self) -> dict[str, Any]:
        """Ids of a chat's prompt. Those of plain prompts stand in their choices."""
        return {"prompt_token_ids": self._prompts[0].tolist()} if self._chat and self._body.return_token_ids else {}

    def _scores(self, result: RequestResult) -> dict[str, Any]:
        """Of a chat's prompt."""
        scores = self._choices[0].prompt_scores(result) if self._chat else None
        return {} if scores is None else {"prompt_logprobs": scores}
