"""Servers on a loopback socket, for tests of routes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx2
import hypercorn.asyncio
import hypercorn.config
import pytest
from plugin_doubles import Installer
from script_llm import PLUGIN

from mlxcel.config import EngineConfig, plugin_limit
from mlxcel.core.source import NoProgress
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.plugins.manager import PluginManager
from mlxcel.serve_engine import Serving, serve
from mlxcel.server.app import create_app
from mlxcel.server.run import listen
from mlxcel.server.settings import ServerSettings, serving_config

PATIENCE = 20.0
"""Seconds after which a test gives a server up."""


@attrs.frozen
class Live:
    """A server that answers; `serving` is what it runs."""

    url: str
    serving: Serving
    client: httpx2.Client

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """`body` is sent as JSON, bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, content=data, headers={"Content-Type": "application/json", **headers})

    def said(self, path: str, body: Any, **headers: str) -> Any:
        """The reply to a request that must succeed."""
        reply = self.post(path, body, **headers)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, body: Any) -> list[tuple[str | None, Any]]:
        """(event, data) of a stream that must begin well, data as JSON, to its end; comments are left out."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        return [event for block in reply.text.split("\n\n") if (event := _event(block)) is not None]

    def idle(self) -> bool:
        """Whether no row runs or waits, and no page is taken, soon."""
        for _ in range(1000):
            stats = self.serving.stats()
            busy = (stats["scheduler"]["rows_busy"], stats["scheduler"]["num_requests_waiting"], stats["kv"]["owned"])
            if busy == (0, 0, 0):
                return True
        return False


def _event(block: str) -> tuple[str | None, Any] | None:
    lines = [line for line in block.split("\n") if line and not line.startswith(":")]
    if not lines:
        return None
    fields = dict(line.split(": ", 1) for line in lines)
    data = fields["data"]
    return fields.get("event"), data if data == "[DONE]" else json.loads(data)


@contextmanager
def live(
    model: Path, *, settings: ServerSettings | None = None, tokenizer: Tokenizer | None = None, **options: Any
) -> Iterator[Live]:
    """A server of one model. `options` are the engine's."""
    settings = attrs.evolve(settings or ServerSettings(), port=0)
    config = serving_config(EngineConfig.resolve({"model": str(model), **options}))
    manager = PluginManager.load(only=plugin_limit(config.plugins), trace=None)
    serving = serve(config, manager, NoProgress(), max_queue_depth=settings.max_queue_depth, tokenizer=tokenizer)
    app = create_app(settings, lambda: serving, config=config)
    sock = listen(settings)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    setup = hypercorn.config.Config()
    setup.bind = [f"fd://{sock.detach()}"]
    setup.graceful_timeout = 1.0
    ready, over = threading.Event(), threading.Event()

    async def main() -> None:
        async def settle() -> None:
            await app.state.server.settled.wait()
            ready.set()

        settling = asyncio.create_task(settle())
        await hypercorn.asyncio.serve(app, setup, shutdown_trigger=lambda: asyncio.to_thread(over.wait), mode="asgi")
        settling.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        with httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            yield Live(url, serving, client)
    finally:
        over.set()
        thread.join(PATIENCE)
        serving.close()


@contextmanager
def script_plugin(folder: Path) -> Iterator[None]:
    """The backend `script`: a model that says what its prompt says."""
    with pytest.MonkeyPatch.context() as patch:
        folder.mkdir()
        patch.syspath_prepend(str(folder))
        Installer(folder).install("script", PLUGIN)
        yield
