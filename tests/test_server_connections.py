"""Connections as they are on the wire: headers before tokens, silence, and clients that hang up
(docs/spec/clients.md 3.6, 3.13: 6, 11, 12)."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from other_threads import PATIENCE, comes_to, until
from script_server import GATE, ScriptServer, commanded, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.settings import ServerSettings

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "<<" + "a" * 1500 + ">>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """One row, two places to wait."""
    settings = ServerSettings(max_queue_depth=2)
    with running(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), settings, max_num_seqs=1) as made:
        yield made


@pytest.fixture(autouse=True)
def open_gate() -> Iterator[None]:
    yield
    GATE.open.set()


def body_of(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    given = {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
    return {**given, **more}


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    read = bytearray()
    while mark not in read[-4096 - len(mark) :]:
        more = connection.recv(4096)
        assert more, f"the connection closed after {read!r}"
        read += more
    return bytes(read)


def waiting(server: ScriptServer) -> int:
    return server.serving.scheduler._inbox.waiting


def finished(server: ScriptServer) -> int:
    return server.serving.scheduler.stats().request_finished_total.total()


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_h_a7_headers_leave_before_the_prompt_was_read(server: ScriptServer, path: str) -> None:
    """H-A7, H-O11: status and headers while the first forward is still held up; then comments; then text."""
    GATE.shut()
    with server.raw(path, body_of(path, "é<<é>>", stream=True, sse_ping_interval=0.01)) as connection:
        head = read_until(connection, b"\r\n\r\n").lower()
        assert head.startswith(b"http/1.1 200")
        for header in (
            b"content-type: text/event-stream; charset=utf-8",
            b"cache-control: no-cache",
            b"x-accel-buffering: no",
            b"x-request-id: req-",
        ):
            assert header in head
        silent = read_until(connection, b": keep-alive\n\n")
        assert b"data:" not in silent
        GATE.open.set()
        assert "é".encode() in read_until(connection, b"data: [DONE]\n\n")


def test_a_fault_in_mid_stream_is_an_event_and_no_end(server: ScriptServer) -> None:
    """3.6: the error in the shape of the route, without `[DONE]` and without an invented finish."""
    for path in (TEXT, CHAT):
        *events, last, rest = server.raw_stream(path, body_of(path, "<<ab!cd>>")).split("\n\n")
        assert rest == ""
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"], error["param"]) == ("server_error", "internal_error", None)
        assert "tripped" not in last
        choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
        assert all(choice["finish_reason"] is None for each in choices for choice in each)
    assert server.ok(TEXT, {"prompt": "<<ok>>"})["choices"][0]["text"] == "ok"


def test_a_client_that_does_not_read_holds_nothing_up(server: ScriptServer) -> None:
    """3.6: the row ends and frees its pages, others are served, and whoever reads late reads all of it."""
    body = {"prompt": "<<" + "a" * 900 + ">>", "stream": True}
    with server.raw(TEXT, body, buffer=4096) as connection:
        until(lambda: server.post(TEXT, {"prompt": "<<ok>>"})[0] == 200 and server.idle())
        read = read_until(connection, b"data: [DONE]\n\n")
    events = [line[6:] for line in read.splitlines() if line.startswith(b"data: {")]
    chunks = [json.loads(event) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a" * 900
    assert chunks[-1]["choices"][0]["finish_cause"] == "eos"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_h_k3_a_client_that_hangs_up_ends_its_row(server: ScriptServer, phase: str, stream: bool) -> None:
    """H-K3: noticed while queued, in prefill and in decode, streamed or not; rows and pages come back."""
    before = server.serving.stats()["scheduler"]["generation_tokens_total"]
    GATE.shut(after=5 if phase == "decode" else 0)
    connections = [server.raw(TEXT, {"prompt": LONG, "stream": stream})]
    assert GATE.waited.wait(PATIENCE)
    if phase == "queued":
        connections.append(server.raw(TEXT, {"prompt": LONG, "stream": stream}))
        comes_to(lambda: waiting(server), 1)
    for connection in reversed(connections):
        connection.close()
    server.heard_hang_ups()
    GATE.open.set()
    assert server.idle()
    drawn = server.serving.stats()["scheduler"]["generation_tokens_total"] - before
    assert drawn < 50
    comes_to(lambda: len(server.state.requests), 0)
    assert server.ok(TEXT, {"prompt": "<<ok>>"})["choices"][0]["text"] == "ok"


def test_one_of_several_prompts_is_not_begun_once_the_client_is_gone(server: ScriptServer) -> None:
    started = server.serving.stats()["scheduler"]["request_started_total"]
    GATE.shut()
    connection = server.raw(TEXT, {"prompt": [LONG] * 20})
    assert GATE.waited.wait(PATIENCE)
    connection.close()
    server.heard_hang_ups()
    GATE.open.set()
    assert server.idle()
    counters = server.serving.stats()["scheduler"]
    assert counters["request_started_total"] - started < 20
    assert sum(counters["request_finished_total"].values()) == counters["request_started_total"]


def test_h_k5_hanging_up_right_after_asking_is_harmless(server: ScriptServer) -> None:
    """H-K5: a hundred times, streamed or not."""
    server.done()
    asked = server.state.metrics.requests
    before = asked.total()
    for number in range(100):
        server.raw(TEXT, {"prompt": LONG, "stream": number % 2 == 0}).close()
    comes_to(lambda: asked.total() - before, 100)
    assert server.ok(TEXT, {"prompt": "<<ok>>"})["choices"][0]["text"] == "ok"
    assert server.idle()
    counters = server.serving.stats()["scheduler"]
    assert sum(counters["request_finished_total"].values()) == counters["request_started_total"]


@pytest.mark.parametrize("stream", [False, True])
def test_h_k7_more_than_may_wait_is_refused_before_the_next_step(server: ScriptServer, stream: bool) -> None:
    """H-K7: one runs, two wait, seven are told when to come back while no step has ended."""
    GATE.shut()
    first = server.raw(TEXT, {"prompt": "<<a>>"})
    assert GATE.waited.wait(PATIENCE)
    others = [server.raw(TEXT, {"prompt": "<<b>>"}) for _ in range(2)]
    comes_to(lambda: waiting(server), 2)
    with ThreadPoolExecutor(7) as pool:
        replies = list(pool.map(lambda _: server.post(TEXT, {"prompt": "<<c>>", "stream": stream}), range(7)))
    assert not GATE.open.is_set()
    for status, reply, headers in replies:
        assert (status, reply["error"]["type"], reply["error"]["code"]) == (503, "server_busy", "queue_full")
        assert 1 <= int(headers["retry-after"]) <= 60
    GATE.open.set()
    for connection, text in zip([first, *others], "abb", strict=True):
        assert f'"text":"{text}"'.encode() in read_until(connection, b'"usage"')
        connection.close()
    assert server.idle()


def test_a_request_whose_time_is_over_is_504(tmp_path: Path) -> None:
    """`--timeout`: before a reply a status, in a stream its last event."""
    late = [0.0]
    model, settings = write_tiny_llama(tmp_path / "tiny"), ServerSettings(timeout=60)
    with running(model, settings, clock=lambda: time.monotonic() + late[0], max_num_seqs=1) as server:
        for stream in (False, True):
            GATE.shut(after=3 if stream else 0)
            with server.raw(TEXT, {"prompt": LONG, "stream": stream}) as connection:
                assert GATE.waited.wait(PATIENCE)
                late[0] += 60
                GATE.open.set()
                reply = read_until(connection, b'"request_id"')
            assert (b" 504 " in reply.split(b"\r\n")[0]) is not stream
            assert b'"type":"server_timeout"' in reply
            assert b'"code":"timeout"' in reply
            assert b"[DONE]" not in reply
        assert server.idle()


def test_a_client_that_takes_nothing_for_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """3.11: its reply is over, and the rest of it is nobody's; without that its connection would be kept for ever."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no bound on the time that a peer takes nothing")
    monkeypatch.setattr("mlxcel.server.run.STALLED", 0.3)
    body = {"prompt": "<<" + "a" * 1000 + ">>", "n": 6, "logprobs": 10, "stream": True}
    with commanded(write_tiny_llama(tmp_path / "tiny")) as server:
        with server.raw(TEXT, body, buffer=2048), server.raw(TEXT, {"prompt": "<<ok>>", "stream": True}) as other:
            comes_to(lambda: finished(server), 7)
            assert read_until(other, b"data: [DONE]\n\n").count(b'"finish_cause":"eos"') == 1
            comes_to(lambda: len(server.state.requests), 0)
        assert server.idle()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_slow_reader_has_the_time_of_a_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11: a reply whose row has ended is a running one until all of it was sent."""
    signals: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def heard(signalled: asyncio.Event) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals.append(lambda: loop.call_soon_threadsafe(signalled.set))
        yield

    monkeypatch.setattr("mlxcel.server.run._signals", heard)
    monkeypatch.setattr("mlxcel.server.run.CLOSING", PATIENCE)
    body = {"prompt": "<<" + "a" * 1000 + ">>", "n": 6, "logprobs": 10, "stream": True}
    with (
        commanded(write_tiny_llama(tmp_path / "tiny")) as server,
        server.raw(TEXT, body, buffer=2048) as connection,
    ):
        comes_to(lambda: finished(server), 6)
        monkeypatch.setattr("mlxcel.server.run.CLOSING", 0.01)
        signals[0]()
        until(lambda: not server.serving.scheduler.healthy)
        assert server.post(TEXT, {"prompt": "<<ok>>"})[0] == 503
        time.sleep(0.1)  # a server that takes the reply for one that is over has closed by then
        monkeypatch.setattr("mlxcel.server.run.CLOSING", PATIENCE)
        assert read_until(connection, b"data: [DONE]\n\n").count(b'"finish_cause":"eos"') == 6
