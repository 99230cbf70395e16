"""Which models are served: one, under its names (docs/spec/clients.md 3.2, 3.6)."""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.server.json_out import Json
from mlxcel.server.refusals import ModelNotFound
from mlxcel.server.state import ServerState


def told(state: ServerState, name: str) -> dict[str, Any]:
    """The model under one of its names."""
    served = state.model
    facts = served.serving.model.facts
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "mlxcel",
        "root": served.names[0],
        "parent": None,
        "max_model_len": facts.context,
        "meta": {
            "n_ctx": facts.context,
            "n_ctx_train": facts.window,
            "n_vocab": facts.vocab,
            "n_params": facts.parameters,
            "size": facts.file_bytes,
        },
    }


async def every(request: Request) -> Response:
    state: ServerState = request.app.state.server
    return Json({"object": "list", "data": [told(state, name) for name in state.model.names]})


async def one(request: Request) -> Response:
    """ModelNotFound for a name that is not served."""
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    if not name:
        raise ModelNotFound(name, state.model.names)
    return Json(told(state, state.model.named(name)))


ROUTES: Final = [
    Route("/v1/models", every),
    Route("/models", every),
    Route("/v1/models/{name:path}", one),
]
