"""Texts to ids and back, and what a chat request really comes to: POST /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.conversation import Conversation
from mlxcel.errors import RequestError
from mlxcel.report import effective
from mlxcel.server.asking import ask
from mlxcel.server.bodies import read_body
from mlxcel.server.fields import ApplyTemplate, Detokenize, Tokenize
from mlxcel.server.json_out import Json
from mlxcel.server.openai_chat import conversation
from mlxcel.server.openai_logprobs import token_piece
from mlxcel.text.prompt import check_ids

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer
    from mlxcel.server.served import ServedModel
    from mlxcel.server.state import ServerState

_SOURCES: Final = ("content", "prompt", "messages")


async def tokenize(request: Request) -> Response:
    """Ids of a text or of a rendered conversation, with `with_pieces` what each says."""
    body = await read_body(request, Tokenize)
    state: ServerState = request.app.state.server
    served = state.model
    served.named(body.model)
    ids = await asyncio.to_thread(_ids, body, served)
    tokens: list[Any] = ids
    if body.with_pieces:
        tokens = [{"id": token, "piece": _piece(served.tokenizer, token)} for token in ids]
    return Json({"tokens": tokens, "count": len(ids), "max_model_len": served.context})


async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens as they are spelled unless they are skipped; once for each of two worlds of
    clients."""
    body = await read_body(request, Detokenize)
    state: ServerState = request.app.state.server
    served = state.model
    served.named(body.model)
    ids = () if body.tokens == [] else check_ids(body.tokens, served.vocab, field="tokens")
    text = await asyncio.to_thread(served.tokenizer.decode, ids, skip_special=body.skip_special_tokens)
    return Json({"content": text, "prompt": text})


async def apply_template(request: Request) -> Response:
    """The prompt of a chat request; with `explain` its ids too, the parameters that would be in force, where each value
    is from, and the template."""
    body = await read_body(request, ApplyTemplate)
    state: ServerState = request.app.state.server
    served = state.model
    served.named(body.model)
    asked = conversation(body, allowed=state.settings.allow_request_templates)
    if not body.explain:
        return Json({"prompt": (await asyncio.to_thread(served.render, asked)).text})
    (prepared,) = await ask(request, body, served, lambda: [asked], name="messages")
    spec, model = prepared.request.choices[0], served.serving.model
    source = asked.chat_template
    if source is None and model.template is not None:
        source = model.template.source
    return Json(
        {
            "prompt": prepared.prompt,
            "token_ids": spec.prompt_ids.tolist(),
            "sampling": effective(spec.params, prepared.request.origin, served.vocab),
            "template_source": source,
            **({"warnings": list(prepared.request.warnings)} if prepared.request.warnings else {}),
        }
    )


def _ids(body: Tokenize, served: ServedModel) -> list[int]:
    given = [name for name in _SOURCES if getattr(body, name) is not None]
    if len(given) != 1:
        said = f"{' and '.join(given)} are given" if given else "nothing is given to be tokenised"
        raise RequestError(f"{said}, one of {', '.join(_SOURCES)} is needed", field=given[1] if given else "content")
    added = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    if None not in (body.add_special, body.add_special_tokens) and body.add_special != body.add_special_tokens:
        raise RequestError(
            "add_special and add_special_tokens are one field, and their values differ", field="add_special_tokens"
        )
    if body.messages is not None:
        generate = body.add_generation_prompt
        asked = Conversation(
            body.messages,
            add_generation_prompt=not body.continue_final_message if generate is None else generate,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        prompt = served.render(asked)
        if not added and body.parse_special:
            return list(prompt.ids)
        text, special = prompt.text or "", bool(added)
        return list(served.tokenizer.encode(text, add_special=special, parse_special=body.parse_special))
    text = body.content if body.content is not None else body.prompt or ""
    special = body.prompt is not None if added is None else added
    return list(served.tokenizer.encode(text, add_special=special, parse_special=body.parse_special))


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The bytes themselves where they are no text."""
    piece = token_piece(tokenizer, token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


ROUTES: Final = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
]
