"""A server over a script, on a free port of this machine and in this process, for real clients."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import script_plugin
from hypercorn.asyncio import serve as run_hypercorn
from hypercorn.config import Config
from other_threads import PATIENCE, idle, until
from script_plugin import GATE
from starlette.applications import Starlette

from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.plugins import discovery
from mlxcel.plugins.discovery import GROUP, EntryPoint
from mlxcel.plugins.manager import PluginManager
from mlxcel.serve_engine import Serving, serve
from mlxcel.server.app import create_app
from mlxcel.server.record import RequestRecord
from mlxcel.server.run import listen, run
from mlxcel.server.settings import ServerSettings, serving_config
from mlxcel.testing.byte_tokenizer import ByteTokenizer

MODEL = "tiny"


def plugins(scripted: bool) -> PluginManager:
    """Those of the project, and where `scripted` the tests' own."""
    entry = EntryPoint("script", script_plugin.__name__, "script", "1")
    own = discovery.entry_points(GROUP, ())
    return PluginManager([*own, entry] if scripted else own, only=None, trace=None)


class ScriptServer:
    """What a test holds of a server that runs. Threads of tests may ask it; `app`, `state` and `serving` are the
    server's own, to be looked at; `end` ends it before its time."""

    def __init__(
        self, port: int, app: Starlette, serving: Serving, loop: asyncio.AbstractEventLoop, end: Callable[[], None]
    ) -> None:
        self.port, self.app, self.serving, self.end = port, app, serving, end
        self._loop = loop
        self.state = app.state.server
        self.url = f"http://127.0.0.1:{port}"
        self._connections: dict[int, HTTPConnection] = {}  # by thread

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded JSON and headers (by lower case) of a request. `body` may be bytes. A thread asks on one
        connection for as long as the server keeps it."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self._connection() as connection:
            connection.request("POST", path, sent, {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            text = reply.read()
        return reply.status, json.loads(text), {name.lower(): value for name, value in reply.getheaders()}

    @contextmanager
    def _connection(self) -> Iterator[HTTPConnection]:
        """One that is open, or can be opened; kept for the next request unless it fails or the server closes it."""
        thread = threading.get_ident()
        connection = self._connections.pop(thread, None) or HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        if connection.sock is not None and select.select([connection.sock], [], [], 0)[0]:
            connection.close()  # the server did so before
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._connections[thread] = connection

    def close(self) -> None:
        """The connections of all threads."""
        while self._connections:
            self._connections.popitem()[1].close()

    def ok(self, path: str, body: Any) -> Any:
        status, reply, _ = self.post(path, body)
        assert status == 200, reply
        return reply

    def raw_stream(self, path: str, body: Any) -> str:
        """All of a stream, as it came."""
        request = urllib.request.Request(
            self.url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return str(reply.read().decode())

    def stream(self, path: str, body: Any) -> list[Any]:
        """The chunks of a stream that ended as it should."""
        *events, end, rest = self.raw_stream(path, body).split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]

    def raw(self, path: str, body: Any, *, buffer: int | None = None) -> socket.socket:
        """A connection on which a request was sent. `buffer` bytes wait on this side, if it is said."""
        sent = json.dumps(body).encode()
        made = socket.socket()
        made.settimeout(PATIENCE)
        if buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.connect(("127.0.0.1", self.port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        )
        made.sendall(head.encode() + sent)
        return made

    def idle(self) -> bool:
        """Whether no row and no page is taken, once those that were cancelled have left."""
        return idle(self.serving)

    def heard_hang_ups(self) -> None:
        """Wait until the server knows of each client of a request that lives that it left, and the engine has been
        told to end its rows."""
        until(lambda: all(record.left for record in self._live()))
        self._behind_the_loop()  # it tells the engine in the same turn

    def done(self) -> None:
        """Wait until every request so far is over: counted, and its line written."""
        until(lambda: not self._live())
        self.serving.stats()  # behind the engine's tick that ended the last row
        self._behind_the_loop()  # and behind what that tick had it do

    def _live(self) -> list[RequestRecord]:
        return list(self.state.requests._live.values())

    def _behind_the_loop(self) -> None:
        """Wait for all that the event loop had to do."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(PATIENCE)


@contextmanager
def running(
    model: Path,
    settings: ServerSettings | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Iterator[ScriptServer]:
    """A server over the checkpoint in `model`, whose replies the script plugin makes, from bytes, unless `options` name
    another backend. `clock` is the scheduler's."""
    app, made = _application(model, settings or ServerSettings(), options, clock)
    bound = socket.create_server(("127.0.0.1", 0), backlog=100)
    port = bound.getsockname()[1]
    hypercorn = Config()
    hypercorn.bind = [f"fd://{bound.detach()}"]
    hypercorn.graceful_timeout = 0.1
    hypercorn.keep_alive_timeout = 3600  # connections are kept between tests: none ends while it is being used
    hypercorn.errorlog = None
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    def work() -> None:
        loop.run_until_complete(run_hypercorn(app, hypercorn, shutdown_trigger=over.wait))  # type: ignore[arg-type]
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    def end() -> None:
        if thread.is_alive():
            GATE.open.set()
            loop.call_soon_threadsafe(over.set)
            thread.join(PATIENCE)

    thread = threading.Thread(target=work, name="script-server")
    thread.start()
    try:
        state = app.state.server
        asyncio.run_coroutine_threadsafe(state.settled.wait(), loop).result(PATIENCE)
        assert state.failure is None, state.failure
        with fresh_numbers(), closing(ScriptServer(port, app, made[0], loop, end)) as server:
            yield server
    finally:
        end()


@contextmanager
def commanded(model: Path, settings: ServerSettings | None = None, **options: Any) -> Iterator[ScriptServer]:
    """As `running`, served as `mlxcel serve` does it: with its socket, its bounds on connections, and its end."""
    settings = settings or ServerSettings(port=0)
    app, made = _application(model, settings, options)
    state, loops, ready = app.state.server, [], threading.Event()
    sock = listen(settings)
    port = sock.getsockname()[1]

    def is_ready() -> None:
        loops.append(asyncio.get_running_loop())
        ready.set()

    thread = threading.Thread(target=lambda: run(app, sock, ready=is_ready), name="commanded-server")

    def end() -> None:
        GATE.open.set()
        with suppress(RuntimeError):  # it may have ended by itself
            loops[0].call_soon_threadsafe(state.over.set)
        thread.join(PATIENCE)
        assert not thread.is_alive()

    thread.start()
    assert ready.wait(PATIENCE)
    try:
        with fresh_numbers(), closing(ScriptServer(port, app, made[0], loops[0], end)) as server:
            yield server
    finally:
        end()


def fresh_numbers() -> AbstractContextManager[object]:
    """No reader of a server's numbers gets those of a moment ago, however long the engine's thread is held up."""
    return patch("mlxcel.server.snapshot.PATIENCE", PATIENCE)


def _application(
    model: Path, settings: ServerSettings, options: dict[str, Any], clock: Callable[[], float] = time.monotonic
) -> tuple[Starlette, list[Serving]]:
    """And where its model will be once it is loaded."""
    GATE.open.set()
    config = serving_config(EngineConfig.resolve({"model": str(model), "backend": "script", **options}, environ={}))
    made: list[Serving] = []

    def load() -> Serving:
        scripted = config.backend == "script"
        serving = serve(
            config,
            plugins(scripted),
            NoProgress(),
            max_queue_depth=settings.max_queue_depth,
            tokenizer=ByteTokenizer() if scripted else None,
            clock=clock,
        )
        made.append(serving)
        return serving

    return create_app(settings, load, config=config), made
