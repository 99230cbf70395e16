"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's API answers them (docs/spec/clients.md 3.6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.core.events import Delta, Ended, Started
from mlxcel.core.prompt_ids import truncate_prompt
from mlxcel.errors import RequestError
from mlxcel.server.asking import ask, ping_of
from mlxcel.server.bodies import read_body
from mlxcel.server.bridge import Replies, hang_up
from mlxcel.server.json_out import Json
from mlxcel.server.message_blocks import as_asked, asked_conversation, speaks
from mlxcel.server.message_fields import CountTokens, Messages, message_sampling
from mlxcel.server.message_reply import PING, MessageEvents, message
from mlxcel.server.results import results_of
from mlxcel.server.sse import PAUSE, EventStream, event
from mlxcel.server.stream_faults import told

if TYPE_CHECKING:
    from mlxcel.conversation import Conversation
    from mlxcel.server.state import ServerState


async def messages(request: Request) -> Response | EventStream:
    """The assistant's next message."""
    body = await read_body(request, Messages)
    state: ServerState = request.app.state.server
    served = state.model
    name = served.named(body.model)
    body.sampling = message_sampling(body.sampling)
    conversation = _conversation(body)
    try:
        [prepared] = await ask(request, body, served, lambda: [conversation], name="messages")
    except RequestError as error:
        raise as_asked(error, system=speaks(body.system)) from None
    identity = f"msg_{body.request_id or request.state.request_id}"
    replies = Replies(served, [prepared])
    if body.stream:
        fed, _ = truncate_prompt(prepared.request.choices[0], served.context)
        events = MessageEvents(identity, name, len(fed.prompt_ids))
        ping = ping_of(body, state.settings)
        frames = _frames(replies, events, request.state.request_id)
        return EventStream(frames, ping, leave=replies.cancel, idle=PING)
    async with hang_up(request.receive, replies.cancel):
        [[result]] = await results_of(replies, 1)
    return Json(message(identity, name, result))


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation is, however long."""
    body = await read_body(request, CountTokens)
    state: ServerState = request.app.state.server
    served = state.model
    served.named(body.model)
    conversation = _conversation(body)
    try:
        prompt = await asyncio.to_thread(conversation.prompt, served.serving.model)
    except RequestError as error:
        raise as_asked(error, system=speaks(body.system)) from None
    return Json({"input_tokens": len(prompt.ids)})


ROUTES: Final = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]


def _conversation(body: Messages | CountTokens) -> Conversation:
    return asked_conversation(
        body.messages, system=body.system, thinking=body.thinking, kwargs=body.chat_template_kwargs
    )


async def _frames(replies: Replies, events: MessageEvents, request_id: str) -> AsyncGenerator[bytes, None]:
    """A fault is the last that is heard."""
    try:
        async for said in replies.as_they_come():
            if said is None:
                yield PAUSE
                continue
            _, heard = said
            if isinstance(heard, Started):
                frames = events.started(heard.cached_tokens)
            elif isinstance(heard, Delta):
                frames = events.delta(heard)
            elif not isinstance(heard, Ended):
                continue
            elif heard.result.error is not None:
                raise heard.result.error
            elif heard.result.cause == "cancelled":
                return
            else:
                frames = events.ended(heard.result)
            for frame in frames:
                yield frame
    except Exception as error:
        replies.cancel()
        yield event("error", told(error, "anthropic", request_id))
