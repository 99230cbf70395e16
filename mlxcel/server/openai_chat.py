"""POST /v1/chat/completions"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.conversation import Conversation
from mlxcel.server.asking import ask, template_of
from mlxcel.server.bodies import read_body
from mlxcel.server.fields import Chat
from mlxcel.server.openai_answer import Kind, answer
from mlxcel.server.openai_choice import ChatChoice
from mlxcel.server.sse import EventStream

if TYPE_CHECKING:
    from mlxcel.server.state import ServerState

CHAT: Final = Kind("chatcmpl", "chat.completion", "chat.completion.chunk", ChatChoice)


async def chat(request: Request) -> Response | EventStream:
    """A conversation's next message."""
    body = await read_body(request, Chat)
    state: ServerState = request.app.state.server
    served = state.model
    served.named(body.model)
    asked = conversation(body, allowed=state.settings.allow_request_templates)
    progress = body.return_progress and body.stream
    prepared = await ask(request, body, served, lambda: [asked], name="messages", progress=progress)
    return await answer(request, body, CHAT, served, prepared)


def conversation(body: Chat, *, allowed: bool) -> Conversation:
    """`allowed` is whether requests may bring a template. A last message that is to be continued needs no new one."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    generate = body.add_generation_prompt
    return Conversation(
        body.messages,
        add_generation_prompt=not body.continue_final_message if generate is None else generate,
        continue_final_message=body.continue_final_message,
        chat_template=template_of(body.chat_template, allowed),
        chat_template_kwargs=kwargs,
    )


ROUTES: Final = [
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/chat/completions", chat, methods=["POST"]),
]
