"""The outermost layer: every request has an id, a record, and an end that is counted and logged."""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcel.server.record import RequestRecord
from mlxcel.server.state import ServerState

ACCEPTED: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
HUNG_UP: Final = 499
"""The status in log and metrics of a request whose client left before there was a reply; none is ever sent."""


def request_id(given: str | None) -> str:
    """The client's own, where it is one (docs/spec/clients.md 3.9)."""
    return given if given is not None and ACCEPTED.fullmatch(given) else f"req-{secrets.token_hex(8)}"


class RequestIds:
    """Puts `record` and `request_id` into the request's state, X-Request-Id and nosniff into its reply."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(
            request_id(Headers(scope=scope).get("x-request-id")),
            scope["method"],
            client=_client(scope),
            started=self._state.clock(),
        )
        self._state.requests.add(record)
        scope["state"] = {**scope.get("state", {}), "record": record, "request_id": record.id}
        whole = False

        async def answer(message: Message) -> None:
            nonlocal whole
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.id
                headers["X-Content-Type-Options"] = "nosniff"
                record.status = message["status"]
                record.stream = headers.get("content-type", "").startswith("text/event-stream")
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                whole = True
            try:
                await send(message)
            except OSError:
                record.left = True
                raise

        async def hear() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not whole:
                record.left = True
            return message

        try:
            await self._app(scope, hear, answer)
        finally:
            if not record.status:
                record.status = HUNG_UP if record.left else 500
            record.route = _route(scope)
            self._state.requests.answered(record, self._state.clock())


def _route(scope: Scope) -> str:
    """The path of the route, as it is written where it is defined: never what a client sent."""
    routes, endpoint = scope["app"].routes, scope.get("endpoint")
    if endpoint is None:  # it did not get as far as a route
        found = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
        endpoint = getattr(next(found, None), "endpoint", None)
    named = (route.path for route in routes if endpoint is not None and getattr(route, "endpoint", None) is endpoint)
    return next(named, "unmatched")


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "-"
