"""What serves, and what it does where a request says nothing: GET /props (docs/spec/clients.md 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.report import effective
from mlxcel.server.json_out import Json
from mlxcel.server.refusals import SwitchedOff
from mlxcel.server.state import ServerState
from mlxcel.version import commit, version

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer


def told(state: ServerState) -> dict[str, Any]:
    """Values in force, and where each came from. No path of this machine, and no key."""
    served, settings = state.model, state.settings
    model = served.serving.model
    resolved = served.resolve({})
    params = effective(resolved.params, resolved.origin, served.vocab)
    order, origin = params.pop("order"), params.pop("origin")
    llama = {"n_predict": resolved.params.max_tokens, "repeat_penalty": resolved.params.repetition_penalty}
    return {
        "default_generation_settings": {"params": {**params, **llama}, "n_ctx": served.context},
        "total_slots": model.engine.settings.slots,
        "model_alias": served.names[0],
        "model_path": served.names[0],
        "modalities": {"vision": False, "audio": False},
        "chat_template": "" if model.template is None else model.template.source,
        "bos_token": _special(model.tokenizer, "bos"),
        "eos_token": _special(model.tokenizer, "eos"),
        "build_info": f"mlxcel {version()} ({commit()})",
        "is_sleeping": False,
        "backend": model.backend,
        "device": model.caps.device,
        "level": model.engine.level,
        "kv_storage": model.kv_storage,
        "prefill_chunk": model.prefill_chunk,
        "samplers": order,
        "eos_token_ids": sorted(model.ends.ids),
        "origin": origin,
        "endpoints": {"ui": settings.ui, "slots": settings.slots, "metrics": settings.metrics, "props": False},
    }


def _special(tokenizer: Tokenizer, role: str) -> str:
    token = tokenizer.special_ids.get(role)
    return "" if token is None else tokenizer.token_text(token)


async def props(request: Request) -> Response:
    return Json(told(request.app.state.server))


async def change(request: Request) -> Response:
    """Nothing of a server changes while it runs."""
    raise SwitchedOff("POST /props is not supported", hint="the flags of `mlxcel serve` say what is in force")


ROUTES: Final = [
    Route("/props", props),
    Route("/props", change, methods=["POST"]),
]
