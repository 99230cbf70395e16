"""What is kept of prompts, and how to forget it (docs/spec/clients.md 3.2)."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.core.prefix import Reject
from mlxcel.core.prompt_cache import CacheStats
from mlxcel.server.json_out import Json
from mlxcel.server.state import ServerState


def told(stats: CacheStats | None, page_size: int) -> dict[str, Any]:
    """As GET /v1/cache/stats says it; None where no prompt is kept."""
    if stats is None:
        nothing = dict.fromkeys(("entries", "pages", "bytes", "capacity_bytes", "lookups", "hits"), 0)
        counts = {"hit_rate": 0.0, "tokens_reused": 0, "inserts": 0, "evictions": {}}
        rejects = dict.fromkeys((reason.value for reason in Reject), 0)
        return {
            "enabled": False, "page_size": page_size, **nothing, **counts, "rejects": rejects, "last_reject": None,
        }  # fmt: skip
    return {
        "enabled": stats.enabled,
        "page_size": stats.page_size,
        "entries": stats.entries,
        "pages": stats.pages,
        "bytes": stats.bytes,
        "capacity_bytes": stats.capacity,
        "lookups": stats.lookups,
        "hits": stats.hits,
        "hit_rate": stats.hit_rate,
        "tokens_reused": stats.tokens_reused,
        "inserts": stats.inserts,
        "evictions": dict(stats.evictions),
        "rejects": dict(stats.rejects),
        "last_reject": stats.last_reject,
    }


async def stats(request: Request) -> Response:
    state: ServerState = request.app.state.server
    snapshot = await state.snapshot()
    return Json(told(snapshot.cache, snapshot.kv.page_size))


async def reset(request: Request) -> Response:
    """Forget every kept prompt; pages that a row uses stay its own."""
    state: ServerState = request.app.state.server
    serving = state.model.serving
    freed = await asyncio.to_thread(serving.reset_cache)
    return Json({"cleared": serving.cache is not None, "freed_entries": freed.entries, "freed_bytes": freed.bytes})


ROUTES: Final = [
    Route("/v1/cache/stats", stats),
    Route("/v1/cache/reset", reset, methods=["POST"]),
]
