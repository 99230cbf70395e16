"""What each row does: GET /slots (docs/spec/clients.md 3.2). Never what was asked or answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.report import effective
from mlxcel.server.json_out import Json
from mlxcel.server.refusals import NoSlotFree, SwitchedOff
from mlxcel.server.state import ServerState

if TYPE_CHECKING:
    from mlxcel.core.row_view import RowView

TEXTS: Final = ("stop", "bad_words", "dry_sequence_breakers", "logit_bias", "logits_processors")
"""Parameters that are, or may have been, words of a request."""


def idle(slot: int, context: int) -> dict[str, Any]:
    return {
        "id": slot,
        "n_ctx": context,
        "is_processing": False,
        "id_task": -1,
        "params": {},
        "next_token": {"has_next_token": False, "n_remain": -1, "n_decoded": 0},
        "state": "idle",
        "prompt_tokens": 0,
        "prompt_done": 0,
        "cached_tokens": 0,
        "cache_miss_reason": None,
        "request_id": None,
    }


def busy(row: RowView, context: int, vocab: int) -> dict[str, Any]:
    """A row that was preempted has no place: its `id` is -1."""
    params = effective(row.params, {}, vocab)
    left = row.max_new - row.generated
    return {
        "id": -1 if row.slot is None else row.slot,
        "n_ctx": context,
        "is_processing": row.slot is not None,
        "id_task": row.request,
        "params": {name: value for name, value in params.items() if name not in (*TEXTS, "origin")},
        "next_token": {"has_next_token": left > 0, "n_remain": left, "n_decoded": row.generated},
        "state": row.phase,
        "prompt_tokens": row.prompt_tokens,
        "prompt_done": row.prompt_done,
        "cached_tokens": row.cached_tokens,
        "cache_miss_reason": row.cache_miss,
        "request_id": row.request_id,
    }


async def slots(request: Request) -> Response:
    """The rows by their places, then those that lost theirs. With `fail_on_no_slot`, NoSlotFree where all are taken."""
    state: ServerState = request.app.state.server
    if not state.settings.slots:
        raise SwitchedOff("/slots is switched off by --no-slots", hint="start the server without it")
    served, snapshot = state.model, await state.snapshot()
    count = served.serving.model.engine.settings.slots
    taken = {row.slot: row for row in snapshot.rows if row.slot is not None}
    if request.query_params.get("fail_on_no_slot", "0") not in ("", "0", "false") and len(taken) >= count:
        raise NoSlotFree(count)
    here = [
        busy(taken[slot], served.context, served.vocab) if slot in taken else idle(slot, served.context)
        for slot in range(count)
    ]
    gone = [busy(row, served.context, served.vocab) for row in snapshot.rows if row.slot is None]
    return Json(here + gone)


ROUTES: Final = [Route("/slots", slots)]
