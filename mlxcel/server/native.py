"""POST /completion, as llama.cpp's server answers it (docs/spec/clients.md 3.6)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.core.events import Delta, Ended, Started
from mlxcel.core.prompt_ids import truncate_prompt
from mlxcel.server.asking import ask, ping_of
from mlxcel.server.bodies import read_body
from mlxcel.server.bridge import Replies, hang_up
from mlxcel.server.native_choice import NativeChoice
from mlxcel.server.native_fields import Native, check_native
from mlxcel.server.native_prompts import native_prompts
from mlxcel.server.native_reply import NativeReply
from mlxcel.server.prompt_progress import PromptProgress
from mlxcel.server.results import results_of, whole
from mlxcel.server.sse import PAUSE, EventStream, data
from mlxcel.server.stream_faults import told

if TYPE_CHECKING:
    from mlxcel.asked import AskedPrompt
    from mlxcel.core.result import RequestResult
    from mlxcel.gather import Prepared
    from mlxcel.server.served import ServedModel
    from mlxcel.server.state import ServerState


async def completion(request: Request) -> Response | EventStream:
    """What goes on from each prompt: one object, or a list where there are several choices."""
    body = await read_body(request, Native)
    state: ServerState = request.app.state.server
    served = state.model
    name = served.named(body.model)
    rows = served.serving.model.engine.settings.slots
    warnings = check_native(body, rows=rows, strict=state.settings.strict)

    def prompts() -> list[AskedPrompt]:
        added = served.resolve(body.sampling).params.add_special_tokens is not False
        most = state.settings.max_prompts
        return native_prompts(body.prompt, served.tokenizer, vocab=served.vocab, added=added, most=most)

    progress = body.return_progress and body.stream
    asked = await ask(request, body, served, prompts, name="prompt", progress=progress)
    prepared = [_warned(each, warnings) for each in asked]
    answer = _Answer(name, served, prepared, body)
    replies = Replies(served, prepared)
    if body.stream:
        ping = ping_of(body, state.settings)
        return EventStream(answer.frames(replies, request.state.request_id), ping, leave=replies.cancel)
    async with hang_up(request.receive, replies.cancel):
        results = await results_of(replies, len(prepared))
    return await whole(answer.whole, results)


ROUTES: Final = [Route(path, completion, methods=["POST"]) for path in ("/completion", "/completions")]


def _warned(prepared: Prepared, warnings: Sequence[str]) -> Prepared:
    request = prepared.request
    return attrs.evolve(prepared, request=attrs.evolve(request, warnings=(*request.warnings, *warnings)))


class _Answer:
    """The replies of one request, whole or piece by piece."""

    def __init__(self, name: str, served: ServedModel, prepared: Sequence[Prepared], body: Native) -> None:
        self._prepared, self._served, self._timed = prepared, served, body.timings_per_token
        self._progress = body.return_progress
        given = ("stream", "n_keep", "n_discard", "timings_per_token")
        self._reply = NativeReply(
            model=name,
            tokenizer=served.tokenizer,
            vocab=served.vocab,
            given={field: getattr(body, field) for field in given},
            return_tokens=body.return_tokens,
            response_fields=body.response_fields,
        )

    def whole(self, results: Sequence[Sequence[RequestResult]]) -> Any:
        flat = [(prompt, result) for prompt, choices in enumerate(results) for result in choices]
        made = [
            self._reply.whole(index, self._prompt(prompt, result), result)
            for index, (prompt, result) in enumerate(flat)
        ]
        return made if len(made) > 1 else made[0]

    async def frames(self, replies: Replies, request_id: str) -> AsyncGenerator[bytes, None]:
        """An object for each piece of text, and a full one for the end of each choice. A fault is the last that is
        heard."""
        choices = self._choices(time.monotonic())
        progress = None
        if self._progress:
            progress = PromptProgress([len(each[0].spec.prompt_ids) for each in choices])
        try:
            async for heard in replies.as_they_come():
                if heard is None:
                    yield PAUSE
                    continue
                prompt, event = heard
                choice = choices[prompt][event.choice]
                if progress is not None and (done := progress.heard(prompt, event)) is not None:
                    yield data(
                        {"index": choice.index, "content": "", "tokens": [], "stop": False, "prompt_progress": done}
                    )
                if isinstance(event, Started | Delta):
                    if (piece := choice.take(event, time.monotonic())) is not None:
                        yield data(piece)
                elif not isinstance(event, Ended):
                    continue
                elif event.result.error is not None:
                    raise event.result.error
                elif event.result.cause == "cancelled":
                    return
                else:
                    yield data(choice.end(self._prompt(prompt, event.result), event.result))
        except Exception as error:
            replies.cancel()
            yield data(told(error, "native", request_id))

    def _choices(self, now: float) -> list[list[NativeChoice]]:
        """By prompt."""
        made = []
        for prompt, each in enumerate(self._prepared):
            specs = [truncate_prompt(spec, self._served.context)[0] for spec in each.request.choices]
            first = prompt * len(specs)
            made.append(
                [NativeChoice(first + place, spec, self._reply, self._timed, now) for place, spec in enumerate(specs)]
            )
        return made

    def _prompt(self, prompt: int, result: RequestResult) -> str:
        """Its text: as it was given, or that of the ids that were fed."""
        text = self._prepared[prompt].prompt
        if text is not None and not result.truncated_tokens:
            return text
        return self._served.tokenizer.decode(result.prompt_ids, skip_special=False)
