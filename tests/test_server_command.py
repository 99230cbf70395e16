"""`mlxcel serve` from its first line to its exit code (docs/spec/clients.md 3.1, 3.11)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import attrs
import pytest
from cli_runs import Cli
from other_threads import PATIENCE, until
from script_server import plugins
from tiny_checkpoint import write_tiny_llama

from mlxcel.cli.foreign_flags import BY_FLAG, FOREIGN
from mlxcel.cli.main import program
from mlxcel.cli.serve_options import FLAGS, SWITCHES, server_settings
from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.errors import EngineUnhealthy, UsageError
from mlxcel.serve_engine import serve
from mlxcel.server.app import create_app
from mlxcel.server.run import listen, run
from mlxcel.server.settings import ServerSettings
from mlxcel.testing.byte_tokenizer import ByteTokenizer

CONTEXT = 1 << 16
ENDLESS = {"prompt": "abc", "max_tokens": CONTEXT - 8, "ignore_eos": True, "stream": True}
"""Longer than anything a test waits for."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"max_position_embeddings": CONTEXT}
    return write_tiny_llama(tmp_path_factory.mktemp("served") / "model", config_overrides=config)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    return Cli(monkeypatch, capfdbinary)


@attrs.frozen
class Served:
    """A server in a process of its own. `lines` fill up as it says them."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str]
    connections: ExitStack

    def ask(self, path: str, body: Any = None) -> HTTPResponse:
        """The head of a reply; the body is the caller's to read."""
        connection = self.connections.enter_context(closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)))
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, sent, {"Content-Type": "application/json"})
        return self.connections.enter_context(connection.getresponse())


@contextmanager
def serving(model: Path, *arguments: str, program: tuple[str, str] = ("-m", "mlxcel")) -> Iterator[Served]:
    command = [sys.executable, *program, "serve", str(model), "--port", "0", "--backend", "reference-numpy"]
    environ = {**os.environ, "MLXCEL_PLUGINS": ""}
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready "):
                break
        port = re.search(r"http://127\.0\.0\.1:(\d+)", lines[-1])
        assert port is not None, lines
        reading = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
        reading.start()
        with ExitStack() as connections:
            yield Served(process, int(port[1]), lines, connections)
            process.wait(PATIENCE)
        reading.join()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def refused_by(server: Served, path: str) -> HTTPResponse | None:
    """The reply, once it is no longer a good one: a signal is a while on its way."""
    reply = server.ask(path)
    return None if reply.status == 200 else reply


def first_chunk(reply: HTTPResponse) -> None:
    while not reply.readline().startswith(b"data: "):
        pass


# --- before anything is loaded ----------------------------------------------------------------------------------------


def test_h_s3_a_port_in_use_is_told_before_the_model_is_looked_at(cli: Cli, tmp_path: Path) -> None:
    """3.13 test 13: a path that could not be loaded proves it."""
    (tmp_path / "broken").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = cli("serve", tmp_path / "broken", "--port", taken.getsockname()[1])
    assert ran.code == 3
    error, hint = ran.err.splitlines()
    assert "cannot be listened on" in error
    assert hint.startswith("hint: ")
    assert "checkpoint" not in ran.err


@pytest.mark.parametrize("host", ["no.such.host.invalid", "1.2.3.4.5", "a b"])
def test_h_s3_a_host_that_is_none(cli: Cli, host: str) -> None:
    ran = cli("serve", "tiny", "--host", host, "--port", 0)
    assert (ran.code in (2, 3), len(ran.err.splitlines())) == (True, 2)
    assert host in ran.err


def test_h_s3_a_model_that_is_missing_or_broken(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, code in ((tmp_path / "nowhere", 2), (tmp_path / "empty", 3)):
        ran = cli("serve", place, "--port", 0, "--offline", "-q")
        assert ran.code == code
        assert [line.partition(":")[0] for line in ran.err.splitlines()] == ["error", "hint"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "holds no key"),
        (b"# only\n\n", "holds no key"),
        (b"\xff", "UTF-8"),
        (b"a\x07b", "API key"),
    ],
)
def test_a_key_file_that_is_none(cli: Cli, tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    ran = cli("serve", "tiny", "--api-key-file", file, "--port", 0)
    assert (ran.code, words in ran.err) == (2, True)
    assert "\x07" not in ran.err


def test_keys_of_all_places_count(tmp_path: Path) -> None:
    """3.1."""
    (tmp_path / "keys").write_text("# mine\n one \n\ntwo\n")
    given = {"api_keys": ("three", "one"), "api_key_file": str(tmp_path / "keys"), "host": None}
    settings = server_settings(given, {"top_k": 3}, "four")
    assert settings.api_keys == ("three", "one", "two", "four")
    assert (settings.host, settings.sampling) == ("127.0.0.1", {"top_k": 3})
    assert "three" not in repr(settings)
    with pytest.raises(UsageError):
        server_settings({"api_keys": ("",)}, {}, None)


def test_flags_are_those_of_the_settings() -> None:
    fields = {field.name for field in attrs.fields(ServerSettings)}
    flags = {flag.field for flag in FLAGS} | {field for field, *_ in SWITCHES}
    assert flags - {"api_key_file"} == fields - {"sampling"}


def test_warnings_of_the_start() -> None:
    """3.7."""
    assert ServerSettings().warnings == ()
    assert len(ServerSettings(host="0.0.0.0").warnings) == 1
    assert ServerSettings(host="0.0.0.0", api_keys=("k",)).warnings == ()
    assert len(ServerSettings(allowed_origins=("*",), api_keys=("k",)).warnings) == 1
    assert ServerSettings(host="/tmp/x.sock").warnings == ServerSettings(host="::1").warnings == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--port 65536", "0 to 65535"),
        ("--port 8_0", "0 to 65535"),
        ("--port 1 --port 2", "twice"),
        ("--porrt 1", "--port"),
        ("--max-queue-depth -1", "integer"),
        ("--timeout nan", "seconds"),
        ("-to x", "seconds"),
        ("--sse-ping-interval -2", "seconds"),
        ("--log-format xml", "text, json"),
        ("--cache-isolation on", "key, off"),
        ("--allowed-origins example.org", "origins"),
        ("--max-body-size 0", "bytes"),
        ("--max-n 0", "65536"),
        ("--chat-template a --chat-template-file b", "both given"),
        ("--mirostat 1 --samplers top_k", "--samplers"),
        ("-q -v", "-q and -v"),
    ],
)
def test_h_s4_what_cannot_be_obeyed_is_refused(cli: Cli, arguments: str, words: str) -> None:
    ran = cli("serve", "tiny", *arguments.split())
    assert (ran.code, words in ran.err) == (2, True), ran.err


def test_flags_of_other_servers_are_refused_by_name(cli: Cli) -> None:
    """3.1."""
    serve_command = program().get_command(None, "serve")  # type: ignore[arg-type]
    assert serve_command is not None
    own = {flag for parameter in serve_command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert own & set(BY_FLAG) == set(), "a flag that we have is not foreign"
    for flag in (each for each in BY_FLAG if each.startswith("--")):
        for arguments in ([flag, "1"], ["x", flag], [f"{flag}=1"]):
            with pytest.raises(UsageError, match=f"^{flag} is a flag of {BY_FLAG[flag].program} ") as caught:
                serve_command.make_context("serve", list(arguments))
            assert caught.value.hint == BY_FLAG[flag].hint, arguments
    for flag in (each for each in BY_FLAG if not each.startswith("--")):  # `-mu` may be `-m u`, until main says no
        for arguments in ([flag, "1"], ["x", flag]):
            ran = cli("serve", *arguments)
            assert (ran.code, f"{flag} is a flag of {BY_FLAG[flag].program}" in ran.err) == (2, True), ran.err
            assert BY_FLAG[flag].hint in ran.err
    assert len(FOREIGN) > 20
    for flag in {foreign.program: flag for flag, foreign in BY_FLAG.items()}.values():
        ran = cli("serve", flag, "1")
        assert (ran.code, f"{flag} is a flag of" in ran.err, BY_FLAG[flag].hint in ran.err) == (2, True, True)


def test_a_value_that_looks_like_a_foreign_flag_is_a_value(cli: Cli, tmp_path: Path) -> None:
    ran = cli("serve", tmp_path / "nowhere", "--port", 0, "--stop", "--lora", "-q")
    assert "foreign" not in ran.err
    assert "--lora" not in ran.err


# --- its life ---------------------------------------------------------------------------------------------------------


HELD_UP = """
import os, sys, time
from mlxcel.cli.main import main
from mlxcel.core.scheduler import Scheduler
tick, goes_on = Scheduler.tick, os.environ["GOES_ON"]

def held_up(scheduler):
    while scheduler.stats().generation_tokens_total > 20 and not os.path.exists(goes_on):
        time.sleep(0.005)
    return tick(scheduler)

Scheduler.tick = held_up
sys.exit(main(sys.argv[1:]))
"""
"""A reply has come so far and no farther until the file GOES_ON is there."""


def test_h_k11_running_replies_end_and_new_requests_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.11, 3.13 test 13: with time enough the stream is whole, and the command ends with 0."""
    monkeypatch.setenv("GOES_ON", str(tmp_path / "goes on"))
    with serving(model, "--no-log-requests", program=("-c", HELD_UP)) as server:
        assert re.match(
            r"ready http://127\.0\.0\.1:\d+ model=model backend=reference-numpy device=\S+ level=R2 rows=4 pages=\d+ "
            r"tokens_fit=\d+ tokens_per_row=\d+ warmup=\d+\.\ds\n$",
            server.lines[-1],
        )
        stream = server.ask("/v1/completions", {**ENDLESS, "max_tokens": 150})
        first_chunk(stream)
        server.process.send_signal(signal.SIGTERM)
        health = until(lambda: refused_by(server, "/health"))
        assert (health.status, json.loads(health.read())["error"]["message"]) == (503, "Shutting down")
        refused = server.ask("/v1/completions", {"prompt": "a"})
        assert (refused.status, json.loads(refused.read())["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["Retry-After"]
        (tmp_path / "goes on").touch()
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert server.process.returncode == 0
    told = [line for line in server.lines if line.startswith("shutting down")]
    assert told == ["shutting down: requests=1 run on for at most 30 s; a second signal ends them at once\n"]


def test_h_k11_what_takes_too_long_is_cut_off_with_an_error(model: Path) -> None:
    with serving(model, "--shutdown-timeout", "0.1") as server:
        stream = server.ask("/v1/completions", ENDLESS)
        first_chunk(stream)
        server.process.send_signal(signal.SIGINT)
        rest = stream.read()
        assert b"shutting_down" in rest
        assert b"[DONE]" not in rest
    assert server.process.returncode == 0
    assert [line for line in server.lines if " cause=cancelled " in line]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_h_k11_a_second_signal_ends_at_once(model: Path, number: signal.Signals, code: int) -> None:
    with serving(model) as server:
        stream = server.ask("/v1/completions", ENDLESS)
        first_chunk(stream)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refused_by(server, "/health"))
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE) == code


KEPT = {"prompt": "abcdefgh" * 25, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
KILLED_WHILE_IT_WRITES = """
import os, sys
from mlxcel.cli.main import main
os.fsync = lambda file: os.kill(os.getpid(), 9)
sys.exit(main(sys.argv[1:]))
"""


def answered(server: Served) -> tuple[str, int]:
    """What is said to KEPT, and how many tokens of it were kept from before."""
    reply = json.loads(server.ask("/v1/completions", KEPT).read())
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """What a server that ends well said to KEPT, and the file of prompts that it wrote."""
    file = tmp_path_factory.mktemp("kept") / "kept"
    with serving(model, "--prompt-cache-file", str(file)) as server:
        text, cached = answered(server)
        server.process.send_signal(signal.SIGTERM)
    assert (server.process.returncode, cached) == (0, 0)
    return text, file.read_bytes()


def test_h_k11_a_server_that_is_killed_leaves_the_file_of_kept_prompts_whole(
    model: Path, kept: tuple[str, bytes], tmp_path: Path
) -> None:
    """3.11: what the end of an earlier one wrote is there for the next, byte for byte."""
    file, (text, written) = tmp_path / "kept", kept
    file.write_bytes(written)
    options = ("--prompt-cache-file", str(file))
    with serving(model, *options) as server:
        again, cached = answered(server)
        assert (again, cached > 100) == (text, True)
        stream = server.ask("/v1/completions", ENDLESS)
        first_chunk(stream)
        server.process.kill()
    assert server.process.returncode == -signal.SIGKILL
    assert file.read_bytes() == written
    with serving(model, *options) as server:
        again, cached = answered(server)
        assert (again, cached > 100) == (text, True)
        server.process.send_signal(signal.SIGTERM)
    assert server.process.returncode == 0


@pytest.mark.parametrize("earlier", [False, True])
def test_h_k11_a_server_that_is_killed_while_it_writes_prompts_is_as_if_it_had_not(
    model: Path, kept: tuple[str, bytes], tmp_path: Path, earlier: bool
) -> None:
    """3.11: the next one reads the file of before, or none; and writes its own."""
    file, (text, written) = tmp_path / "kept", kept
    options = ("--prompt-cache-file", str(file))
    if earlier:
        file.write_bytes(written)
    with serving(model, *options, program=("-c", KILLED_WHILE_IT_WRITES)) as server:
        assert answered(server)[0] == text
        server.process.send_signal(signal.SIGTERM)
    assert server.process.returncode == -signal.SIGKILL
    assert (file.read_bytes() if earlier else file.exists()) == (written if earlier else False)
    assert len(list(tmp_path.glob("kept.*.part"))) == 1
    with serving(model, *options) as server:
        again, cached = answered(server)
        server.process.send_signal(signal.SIGTERM)
    assert (again, cached > 100) == (text, earlier)
    assert (server.process.returncode, [line for line in server.lines if "warning" in line]) == (0, [])
    assert file.exists()
    assert list(tmp_path.glob("kept.*.part")) == [], "what the kill left is gone"


def test_an_engine_that_is_gone_ends_the_server(model: Path) -> None:
    """3.11: the client hears of it, and the command's exit code is 3."""
    config = EngineConfig.resolve({"model": str(model), "backend": "script", "max_consecutive_faults": 1}, environ={})
    settings, manager = ServerSettings(port=0), plugins(scripted=True)

    app = create_app(
        settings,
        lambda: serve(config, manager, NoProgress(), max_queue_depth=4, tokenizer=ByteTokenizer()),
        config=config,
    )
    sock, ready, raised = listen(settings), threading.Event(), []
    port = sock.getsockname()[1]

    def work() -> None:
        try:
            run(app, sock, ready=ready.set)
        except EngineUnhealthy as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(PATIENCE)
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("POST", "/v1/completions", '{"prompt": "<<@99999>>"}', {"Content-Type": "application/json"})
        with connection.getresponse() as reply:
            assert reply.status in (500, 503)
    thread.join(PATIENCE)
    assert [error.exit_code for error in raised] == [3]


def test_a_unix_socket(cli: Cli, model: Path, tmp_path: Path) -> None:
    """3.1: one that was left behind is taken over, one in use is not."""
    settings = ServerSettings(host=str(tmp_path / "s.sock"))
    listen(settings).close()
    with listen(settings):
        ran = cli("serve", model, "--host", settings.host)
        assert (ran.code, "cannot be listened on" in ran.err) == (3, True)
