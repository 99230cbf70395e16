"""The application over a script, asked in this process without a socket: for layers and routes that answer at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from script_plugin import GATE
from script_server import fresh_numbers, plugins
from starlette.testclient import TestClient

from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.serve_engine import Serving, serve
from mlxcel.server.app import create_app
from mlxcel.server.settings import ServerSettings, serving_config
from mlxcel.testing.byte_tokenizer import ByteTokenizer


@contextmanager
def asked(
    model: Path,
    settings: ServerSettings | None = None,
    *,
    before: Callable[[], None] = lambda: None,
    wait: bool = True,
    write: Callable[[str], None] | None = None,
    **options: Any,
) -> Iterator[TestClient]:
    """A client of the application, ready unless `wait` is false. `before` is called before the model is loaded, on the
    thread that does it; `write` gets the lines on requests."""
    settings = settings or ServerSettings()
    GATE.open.set()
    config = serving_config(EngineConfig.resolve({"model": str(model), "backend": "script", **options}, environ={}))

    def load() -> Serving:
        before()
        return serve(
            config,
            plugins(scripted=True),
            NoProgress(),
            max_queue_depth=settings.max_queue_depth,
            warm=True,
            tokenizer=ByteTokenizer(),
        )

    app = create_app(settings, load, config=config, write=write)
    with fresh_numbers(), TestClient(app, raise_server_exceptions=False) as client:
        if wait:
            ready(client)
            assert app.state.server.failure is None
        yield client


def ready(client: TestClient) -> None:
    """Wait until loading is over, whatever came of it."""
    assert client.portal is not None
    client.portal.call(client.app.state.server.settled.wait)
