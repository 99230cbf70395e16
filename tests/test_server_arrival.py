"""Requests that arrive slowly, in crumbs, or not at all (docs/spec/clients.md 3.5, 3.11)."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from other_threads import PATIENCE, comes_to, until
from script_server import ScriptServer, commanded, running
from starlette.types import Message, Receive, Scope, Send
from test_server_bodies import reading
from test_server_connections import read_until
from tiny_checkpoint import write_tiny_llama

from mlxcel.server import arrival, bodies
from mlxcel.server.arrival import Arrival
from mlxcel.server.fields import Completion
from mlxcel.server.json_in import parse_json
from mlxcel.server.refusals import BodyTooSlow
from mlxcel.server.settings import ServerSettings

KEY = "sk-a"
CRUMBS = b"1\r\n \r\n" * 100
"""More pieces of a body than a connection of hypercorn's queues, in one packet."""

MEMORY = 8
"""Bytes at most for one of a body that arrives in pairs; if each pair stayed an object of Python's it were over 20."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    with running(model, ServerSettings(api_keys=(KEY,), max_body_size=1 << 16)) as made:
        yield made


def begun(server: ScriptServer, method: str, path: str, *headers: str, body: bytes = b"") -> socket.socket:
    """A connection on which the head of a request was sent, in one packet with the beginning of its body."""
    made = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]
    made.sendall("\r\n".join(lines).encode() + body)
    return made


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes, over bytes that it did not read or not."""
    read = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            read += more
    return read


@pytest.mark.parametrize("end", [b"", b"0\r\n\r\n"])
@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/completions", (), 401),
        ("POST", "/v1/completions", (f"x-api-key: {KEY}", "Content-Type: text/plain"), 415),
        ("POST", "/v1/completions", (f"x-api-key: {KEY}", "Content-Length: 9999999"), 413),
        ("POST", "/nowhere", (f"x-api-key: {KEY}",), 404),
        ("POST", "/v1/cache/reset", (f"x-api-key: {KEY}",), 200),
        ("GET", "/health", (), 200),
        ("OPTIONS", "/v1/completions", ("Origin: http://localhost", "Access-Control-Request-Method: POST"), 204),
    ],
)
def test_a_body_that_nobody_reads_holds_no_connection(
    server: ScriptServer,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    headers: tuple[str, ...],
    status: int,
    end: bytes,
) -> None:
    """3.11: it is answered, and then it is gone, in however many pieces the body comes and whether or not it ends."""
    monkeypatch.setattr(arrival, "LINGER", 0.02)
    chunked = () if "Content-Length" in str(headers) else ("Transfer-Encoding: chunked",)
    with begun(server, method, path, *headers, *chunked, body=CRUMBS + end) as connection:
        reply = read_until(connection, b"\r\n\r\n")
        assert reply.startswith(f"HTTP/1.1 {status} ".encode())
        if not end:
            rest_of(connection)
        comes_to(lambda: len(server.state.requests), 0)
    assert server.post("/v1/completions", {"prompt": "<<ok>>"}, {"x-api-key": KEY})[0] == 200


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/completions", {"type": "invalid_request_error", "code": "request_timeout"}),
        ("/completion", {"type": "invalid_request_error", "code": 408}),
        ("/v1/messages", {"type": "invalid_request_error"}),
    ],
)
@pytest.mark.parametrize("sent", [b"", b'{"prompt": "a', b'{"prompt": ["a"'])
def test_a_body_that_does_not_arrive_is_408(
    server: ScriptServer, monkeypatch: pytest.MonkeyPatch, path: str, told: dict[str, Any], sent: bytes
) -> None:
    """3.5: in the shape of its route, and the connection is closed behind it."""
    monkeypatch.setattr(arrival, "PATIENCE", 0.02)
    monkeypatch.setattr(arrival, "LINGER", 0.02)
    with begun(server, "POST", path, f"x-api-key: {KEY}", "Content-Length: 1000", body=sent) as connection:
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert {name: error[name] for name in told} == told
    assert f"{len(sent)} bytes" in error["message"]
    comes_to(lambda: len(server.state.requests), 0)


class Paced(asyncio.SelectorEventLoop):
    """Time goes by when it is told to."""

    now = 0.0

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("gap", "size", "arrives"),
    [(29.0, 16 << 20, True), (1.0, 16 << 10, True), (1.0, (16 << 10) - 1000, False), (31.0, 1 << 30, False)],
)
def test_what_arrives_gives_time_for_more(gap: float, size: int, arrives: bool) -> None:
    """3.5: 30 seconds, and as many more as 16 KiB a second would have taken; a thousand pieces, `gap` seconds apart."""
    loop = Paced()

    async def receive() -> Message:
        loop.now += gap
        for _ in range(3):
            await asyncio.sleep(0)
        return {"type": "http.request", "body": Sized(size), "more_body": True}

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(1000):
            await receive()

    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent here")

    scope = {"type": "http", "http_version": "1.1", "headers": [(b"transfer-encoding", b"chunked")]}
    try:
        if arrives:
            loop.run_until_complete(Arrival(read)(scope, receive, send))
        else:
            with pytest.raises(BodyTooSlow):
                loop.run_until_complete(Arrival(read)(scope, receive, send))
    finally:
        loop.close()


class Sized(bytes):
    """Bytes of which only the number matters."""

    def __new__(cls, size: int) -> Sized:
        made = super().__new__(cls)
        made.size = size
        return made

    size: int

    def __len__(self) -> int:
        return self.size


def test_a_body_in_crumbs_costs_what_it_is() -> None:
    """H-P3: what comes by itself is no object that is kept."""
    body = b'{"prompt":"' + b"a" * 50_000 + b'"}'
    parts = ({"type": "http.request", "body": body[at : at + 2], "more_body": True} for at in range(0, len(body), 2))
    client, _ = reading(Completion)
    sent: list[Message] = []

    async def receive() -> Message:
        return next(parts, {"type": "http.request", "body": b"", "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        await client.app(scope, receive, send)

    scope = {"type": "http", "method": "POST", "path": "/read", "headers": [], "query_string": b"", "root_path": ""}
    tracemalloc.start()
    try:
        asyncio.run(ask())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent[0]["status"] == 200
    assert most < MEMORY * len(body)


def test_a_long_body_is_read_beside_the_event_loop_and_alone(
    server: ScriptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.5: while one is taken apart others are answered, and no second one is: it may be much memory."""
    go, inside, most = threading.Event(), [0], [0]

    def slow(body: Any) -> Any:
        if len(body) > 60_000:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            assert go.wait(PATIENCE)
            inside[0] -= 1
        return parse_json(body)

    monkeypatch.setattr(bodies, "parse_json", slow)
    monkeypatch.setattr(bodies, "MOST_TEXT", 60_000)
    long = {"prompt": "<<ok>>", "metadata": {"a": "x" * 50_000, "b": "x" * 12_000}}
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(server.post, "/v1/completions", long, {"x-api-key": KEY}) for _ in range(3)]
        until(lambda: len(server.state.requests) == 3 and inside[0] == 1)
        assert server.post("/v1/completions", {"prompt": "<<ok>>"}, {"x-api-key": KEY})[0] == 200
        go.set()
        assert [each.result()[0] for each in asked] == [200] * 3
    assert most == [1]


def test_a_head_that_does_not_arrive_is_cut_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.5: however it trickles, as the first request of a connection and as a later one."""
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for seconds in (0.25, 1.0, 4.0, 16.0):  # a busy machine may not have read the whole one in time
        monkeypatch.setattr("mlxcel.server.run.KEEP_ALIVE", seconds)
        answered = []
        with commanded(model) as server:
            for before in (b"", whole):
                with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
                    connection.sendall(before + whole[:-2])
                    answered.append(rest_of(connection).count(b"HTTP/1.1 200 "))
        if answered == [0, 1]:
            break
    assert answered == [0, 1]
