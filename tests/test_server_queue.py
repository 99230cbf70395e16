"""A bounded queue, many clients, and whatever a connection may bring (docs/spec/clients.md 3.5, 3.11)."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asked_app import asked
from other_threads import PATIENCE, comes_to
from plugin_doubles import HEADER
from script_plugin import GATE
from script_server import commanded, running
from starlette.testclient import TestClient
from tiny_checkpoint import write_tiny_llama

from mlxcel.plugins.manager import PluginManager
from mlxcel.server.body_limit import HEADERS
from mlxcel.server.run import _unless_a_client_is_gone, listen, url
from mlxcel.server.settings import ServerSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("served") / "model")


def complete(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, **body})


def test_h_k7_what_overflows_the_queue_is_refused_before_the_next_step(model: Path) -> None:
    """3.13 test 12: one row, two places, ten requests, and a step that waits until all are answered or wait."""
    with running(model, ServerSettings(max_queue_depth=2), max_num_seqs=1) as server, ThreadPoolExecutor(10) as pool:
        GATE.shut()
        first = pool.submit(server.post, "/v1/completions", {"prompt": "<<first>>", "max_tokens": 5})
        assert GATE.waited.wait(PATIENCE)
        others = [pool.submit(server.post, "/v1/completions", {"prompt": "<<x>>", "max_tokens": 5}) for _ in range(9)]
        comes_to(lambda: sum(other.done() for other in others), 7)
        refused = [other.result() for other in others if other.done()]
        assert not first.done()
        for status, body, headers in refused:
            assert (status, body["error"]["code"], body["error"]["type"]) == (503, "queue_full", "server_busy")
            assert 1 <= int(headers["retry-after"]) <= 60
        assert server.state.refusal() is None, "a full queue does not change the health"
        GATE.open.set()
        assert first.result()[0] == 200
        assert sorted(other.result()[0] for other in others) == [200] * 2 + [503] * 7
        assert server.idle()


def test_a_queue_of_none_lets_run_what_can_run(model: Path) -> None:
    with running(model, ServerSettings(max_queue_depth=0), max_num_seqs=1) as server:
        assert server.post("/v1/completions", {"prompt": "<<a>>"})[0] == 200


def test_h_k13_the_first_request_on_each_thread_works(model: Path) -> None:
    """Many clients at once, right behind the start; none sees another's reply."""
    with running(model) as server, ThreadPoolExecutor(8) as pool:
        texts = [f"reply {number}" for number in range(8)]
        found = list(pool.map(lambda text: server.ok("/v1/completions", {"prompt": f"<<{text}>>"}), texts))
        assert [each["choices"][0]["text"] for each in found] == texts


def test_equal_ids_of_live_requests_are_told_apart(model: Path) -> None:
    """3.9: the second gets a suffix."""
    with running(model, max_num_seqs=2) as server, ThreadPoolExecutor(2) as pool:
        GATE.shut()
        own = {"X-Request-Id": "same"}
        asked_for = [pool.submit(server.post, "/v1/completions", {"prompt": "<<a>>"}, own) for _ in range(2)]
        comes_to(lambda: len(server.state.requests), 2)
        GATE.open.set()
        assert {each.result()[2]["x-request-id"] for each in asked_for} == {"same", "same.2"}
        server.done()
        assert server.post("/v1/completions", {"prompt": "<<a>>"}, own)[2]["x-request-id"] == "same"


# --- run: hypercorn as it is set up -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[tuple[str, int]]:
    with commanded(model, backend="reference-numpy") as server:
        yield "127.0.0.1", server.port


def test_the_port_that_was_found_is_told() -> None:
    settings = ServerSettings(port=0)
    with listen(settings) as sock:
        assert url(settings, sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_header_block_has_a_bound(address: tuple[str, int]) -> None:
    """3.5."""
    long = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * HEADERS + b"\r\nConnection: close\r\n\r\n"
    assert exchange(address, long).startswith(b"HTTP/1.1 431 ")
    fits = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (HEADERS // 2) + b"\r\nConnection: close\r\n\r\n"
    assert exchange(address, fits).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"\r\n" * 50,
        b"GET /\x00 HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_request_harm_nobody(address: tuple[str, int], sent: bytes) -> None:
    assert not exchange(address, sent).startswith(b"HTTP/1.1 5")
    assert exchange(address, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200 "
    )


def test_no_server_is_named(address: tuple[str, int]) -> None:
    """3.12."""
    head = (
        exchange(address, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").split(b"\r\n\r\n")[0].lower()
    )
    assert b"server:" not in head
    assert b"hypercorn" not in head


def test_a_body_that_is_too_large_is_answered_over_a_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is still sending gets to see the refusal."""
    monkeypatch.setattr("mlxcel.server.arrival.LINGER", PATIENCE)  # it may be a slow one
    body = json.dumps({"prompt": "x" * (9 << 20)}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    reply = exchange(address, head.encode() + body)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "body_too_large"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("given", [0.02, PATIENCE])
def test_a_client_that_reads_nothing_cannot_hold_up_the_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: float
) -> None:
    """3.11: sockets are closed, whatever is still unsent, also where hypercorn still gives connections their time: a
    machine that stood still may be that late."""
    monkeypatch.setattr("mlxcel.server.run.CLOSING", given)
    body = {"prompt": f"<<{'a' * 1000}>>", "n": 6, "logprobs": 10, "stream": True}
    with commanded(model) as server, server.raw("/v1/completions", body, buffer=2048):
        comes_to(lambda: server.serving.scheduler.stats().request_finished_total.total(), 6)
        monkeypatch.setattr("mlxcel.server.run.CLOSING", 0.02)
        server.end()
    gc.collect()  # what was left behind is found now
    assert "left behind" in caplog.text
    assert not server.serving.scheduler.healthy


@pytest.mark.parametrize(
    ("error", "heard"), [(BrokenPipeError(), False), (asyncio.CancelledError(), False), (RuntimeError("a fault"), True)]
)
def test_what_asyncio_says_of_a_connection_is_no_fault(error: BaseException, heard: bool) -> None:
    """Its client is gone, or it was cancelled at the end (which Python 3.11 says); a real fault is told as ever."""
    found: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.default_exception_handler = found.append  # type: ignore[method-assign]
    _unless_a_client_is_gone(loop, {"message": "in a callback", "exception": error})
    loop.close()
    assert bool(found) == heard


# --- routes of plugins ------------------------------------------------------------------------------------------------


ROUTE = (
    HEADER
    + """
@hookimpl
def mlxcel_routes(engine):
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def family(request):
        return JSONResponse({"family": engine.model.facts.family})

    return [Route("/my/family", family)]
"""
)


def plugin_manager(third_party: Any, text: str) -> PluginManager:
    third_party.install("Every.Hook", text)
    return PluginManager.load(only=None, trace=None)


def test_a_plugin_adds_a_route_behind_the_layers(
    model: Path, third_party: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/hooks.md, mlxcel_routes."""
    manager = plugin_manager(third_party, ROUTE)
    monkeypatch.setattr("asked_app.plugins", lambda scripted: manager)
    with asked(model, ServerSettings(api_keys=("k",)), backend="reference-numpy") as client:
        assert client.get("/my/family").status_code == 401
        reply = client.get("/my/family", headers={"x-api-key": "k"})
        assert (reply.status_code, reply.json()) == (200, {"family": "llama"})
        assert reply.headers["x-request-id"]
        assert client.post("/my/family", headers={"x-api-key": "k"}).status_code == 405
        page = client.get("/metrics", headers={"x-api-key": "k"}).text
        assert 'mlxcel_requests_total{route="/my/family",status="200"} 1.0' in page


def test_a_plugin_cannot_take_a_route_of_the_server(
    model: Path, third_party: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = plugin_manager(third_party, ROUTE.replace("/my/family", "/health"))
    monkeypatch.setattr("asked_app.plugins", lambda scripted: manager)
    with asked(model, backend="reference-numpy", wait=False) as client:
        state = client.app.state.server  # type: ignore[attr-defined]
        assert client.portal is not None
        client.portal.call(state.settled.wait)
        assert "/health of Every.Hook (every-hook 1.0)" in str(state.failure)
