"""A server for the chat page whose every answer is up to the test: replies chunk by chunk, refusals at will."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

import attrs
import hypercorn.asyncio
from hypercorn.config import Config
from other_threads import PATIENCE
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mlxcel.server.page_routes import INDEX, files

PARAMS = {
    "temperature": 0.6, "top_k": 40, "top_p": 0.949999988079071, "min_p": 0.05, "max_tokens": -1, "seed": -1,
    "repetition_penalty": 1.0, "stop": [],
}  # fmt: skip


@attrs.frozen
class Refused:
    """What a call is answered with instead of a reply."""

    status: int
    message: str
    code: str | None = None
    headers: dict[str, str] = attrs.field(factory=dict)


@attrs.define
class PageServer:
    """Serves the page on a free port of this machine, from a thread, between `start` and `stop`.

    `bodies` are the requests for a reply, in order; `hung_up` counts those whose client left. A reply says what `say`
    and `finish` give it, or all of `answer` at once where that is set. `health` None: the server is ready.
    """

    port: int = 0
    key: str | None = None
    health: Refused | None = None
    answer: str | None = None
    refusals: deque[Refused] = attrs.field(factory=deque)
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    keys: list[str | None] = attrs.field(factory=list)
    hung_up: int = 0
    _loop: asyncio.AbstractEventLoop = attrs.field(factory=asyncio.new_event_loop, init=False)
    _over: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _said: asyncio.Queue[str] = attrs.field(factory=asyncio.Queue, init=False)
    _taken: bool = attrs.field(default=False, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> Self:
        bound = socket.create_server(("127.0.0.1", self.port), backlog=100)
        self.port = bound.getsockname()[1]
        config = Config()
        config.bind = [f"fd://{bound.detach()}"]
        config.graceful_timeout = 0.1
        config.errorlog = None
        self._thread = threading.Thread(target=self._run, args=(config,), name="page-server")
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(PATIENCE)

    def _run(self, config: Config) -> None:
        serving = hypercorn.asyncio.serve(
            self._app(),  # type: ignore[arg-type]
            config,
            shutdown_trigger=self._over.wait,
            mode="asgi",
        )
        self._loop.run_until_complete(serving)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._index),
                Route("/assets/{name}", self._asset),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/props", self._props),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    # --- what a reply says --------------------------------------------------------------------------------------------

    def say(self, text: str, generated: int, **delta: str) -> None:
        """One chunk of text (or of `delta`); `generated` tokens there are by then."""
        choice = {"index": 0, "delta": {"content": text, **delta} if text else delta, "finish_reason": None}
        self.event({"choices": [choice], "usage": usage(generated)})

    def finish(self, generated: int, cause: str = "eos", stop: object = None, **extra: object) -> None:
        """The end of a reply: its finish chunk, its usage and the end mark."""
        choice = {"index": 0, "delta": {}, "finish_reason": "stop", "finish_cause": cause, "stop_reason": stop}
        self.event({"choices": [choice], "usage": usage(generated)})
        self.event({"choices": [], "usage": usage(generated), **extra})
        self._put("data: [DONE]\n\n")

    def event(self, said: dict[str, Any]) -> None:
        self._put(f"data: {json.dumps(said)}\n\n")

    def cut(self) -> None:
        """The connection closes, with nothing said about it."""
        self._put("")

    def _put(self, frame: str) -> None:
        self._loop.call_soon_threadsafe(self._said.put_nowait, frame)

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        return self._file(INDEX)

    async def _asset(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        return Response(files()[name].content, headers=files()[name].headers)

    async def _health(self, request: Request) -> Response:
        if self.health is None:
            return JSONResponse({"status": "ok"})
        return self._refused(self.health)

    async def _models(self, request: Request) -> Response:
        return self._unless_locked(request, {"object": "list", "data": [{"id": "tiny-llama"}]})

    async def _props(self, request: Request) -> Response:
        settings = {"params": PARAMS, "n_ctx": 2048}
        about = {"backend": "reference-numpy", "device": "cpu", "origin": {"temperature": "generation_config"}}
        return self._unless_locked(request, {"default_generation_settings": settings, **about})

    def _unless_locked(self, request: Request, said: dict[str, Any]) -> Response:
        return JSONResponse(said) if self._unlocked(request) else self._refused(LOCKED)

    def _unlocked(self, request: Request) -> bool:
        given = request.headers.get("authorization")
        self.keys.append(given)
        return self.key is None or given == f"Bearer {self.key}"

    async def _chat(self, request: Request) -> Response:
        if not self._unlocked(request):
            return self._refused(LOCKED)
        self.bodies.append(await request.json())
        if self.refusals:
            return self._refused(self.refusals.popleft())
        if self._taken:  # by a reply whose client left, and nobody noticed yet
            self._said = asyncio.Queue()
        self._taken = True
        if self.answer is not None:
            pieces = [self.answer[at : at + 7] for at in range(0, len(self.answer), 7)]
            for at, piece in enumerate(pieces):
                self.say(piece, at + 1)
            self.finish(len(pieces))
        headers = {"X-Request-Id": f"req-{len(self.bodies):04}"}
        return StreamingResponse(self._frames(self._said), media_type="text/event-stream", headers=headers)

    async def _frames(self, said: asyncio.Queue[str]) -> AsyncIterator[str]:
        whole = False
        try:
            while frame := await said.get():
                yield frame
                whole = frame == "data: [DONE]\n\n"
                if whole:
                    return
            whole = True
        finally:
            self.hung_up += not whole
            if self._said is said:
                self._said, self._taken = asyncio.Queue(), False

    def _refused(self, it: Refused) -> Response:
        error = {"message": it.message, "type": "refused", "param": None, "code": it.code}
        return JSONResponse({"error": error}, it.status, {"X-Request-Id": "req-refused", **it.headers})


def usage(generated: int) -> dict[str, Any]:
    """Of a prompt of 21 tokens, of which 16 were cached."""
    return {
        "prompt_tokens": 21,
        "completion_tokens": generated,
        "total_tokens": 21 + generated,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


LOCKED = Refused(401, "This server needs an API key", "invalid_api_key", {"WWW-Authenticate": "Bearer"})
LOADING = Refused(503, "Loading model", "model_loading", {"Retry-After": "5"})
DRAINING = Refused(503, "Shutting down", "shutting_down", {"Retry-After": "5"})
UNHEALTHY = Refused(503, "Engine unhealthy", "engine_unhealthy", {"Retry-After": "5"})
FULL = Refused(503, "2 requests are waiting, the queue holds 2", "queue_full", {"Retry-After": "3"})
