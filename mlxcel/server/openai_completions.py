"""POST /v1/completions"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.server.asking import ask
from mlxcel.server.bodies import read_body
from mlxcel.server.fields import Completion
from mlxcel.server.openai_answer import Kind, answer
from mlxcel.server.openai_choice import TextChoice
from mlxcel.server.openai_prompts import openai_prompts
from mlxcel.server.sse import EventStream

if TYPE_CHECKING:
    from mlxcel.asked import AskedPrompt
    from mlxcel.server.state import ServerState

COMPLETION: Final = Kind("cmpl", "text_completion", "text_completion", TextChoice)


async def completions(request: Request) -> Response | EventStream:
    """What goes on from each prompt."""
    body = await read_body(request, Completion)
    state: ServerState = request.app.state.server
    served = state.model
    served.named(body.model)

    def prompts() -> list[AskedPrompt]:
        return openai_prompts(body.prompt, vocab=served.vocab, most=state.settings.max_prompts)

    progress = body.return_progress and body.stream
    prepared = await ask(request, body, served, prompts, name="prompt", echo=body.echo, progress=progress)
    return await answer(request, body, COMPLETION, served, prepared)


ROUTES: Final = [Route("/v1/completions", completions, methods=["POST"])]
