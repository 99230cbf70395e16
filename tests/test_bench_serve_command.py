"""`mlxcel bench serve` as a command: its output, its exit codes, what it refuses, and who sees its key
(docs/spec/clients.md 8.1, 8.4: 4, 7, 9)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
from cli_runs import Cli
from closed_port import closed_port
from load_stub import DONE, Script, event, refusal, reply, text
from other_threads import until
from script_plugin import GATE
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.cli.bench_serve_options import FLAGS
from mlxcel.server.settings import ServerSettings

KEY = "sk-a-key-that-nobody-sees"
PAGE = Path(__file__).parent.parent / "docs" / "bench-serve.md"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    for name in ("OPENAI_API_KEY", "MLXCEL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return Cli(monkeypatch, capfdbinary)


@attrs.define
class Other:
    """A server that is not ours: it has models and completions, and nothing else. Each reply is the next script, but
    for its pauses. `heard` are the headers of each request, `bodies` are those of completions; `look` is called before
    a POST."""

    url: str
    scripts: list[Script]
    heard: list[dict[str, str]] = attrs.field(factory=list)
    bodies: list[Any] = attrs.field(factory=list)
    look: Callable[[], None] = lambda: None


@contextmanager
def other(*scripts: Script) -> Iterator[Other]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            found.heard.append({name.title(): value for name, value in self.headers.items()})
            known = self.path == "/v1/models"
            body = json.dumps({"data": [{"id": "theirs"}]} if known else {"error": "none"}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            found.look()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self.send_error(404)
                return
            found.heard.append({name.title(): value for name, value in self.headers.items()})
            found.bodies.append(body)
            for _, act in found.scripts.pop(0):
                assert isinstance(act, bytes)
                self.wfile.write(act)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    found = Other(f"http://127.0.0.1:{server.server_port}", list(scripts))
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def words(served: Other, count: int, *more: object) -> Sequence[object]:
    return ("bench", "serve", "--base-url", served.url, "--num-prompts", count, "--max-concurrency", 1, *more)


GOOD = reply(0.0, 0.0)
BROKEN = refusal(500, b'{"error": {"message": "it broke"}}')


# --- results and exit codes -------------------------------------------------------------------------------------------


def test_a_table_and_an_object(cli: Cli, tmp_path: Path) -> None:
    """The warm-up is in neither; --save-result has what --json has, and --save-detailed each request."""
    file = tmp_path / "result.json"
    with other(GOOD, GOOD, GOOD, GOOD, GOOD, GOOD) as served:
        ran = cli(*words(served, 2, "--save-result", file, "--label", "first"))
        assert ran.code == 0, ran.err
        assert "requests completed" in ran.out
        assert "ttft" in ran.out
        saved = json.loads(file.read_text())
        assert (saved["completed"], saved["model_id"], saved["label"]) == (2, "theirs", "first")
        assert (saved["length_source"], saved["server_version"], saved["request_rate"]) == ("words", None, "inf")
        assert "ttfts" not in saved
        ran = cli(*words(served, 2, "--json", "--save-detailed", "-q"))
        assert (ran.code, ran.err) == (0, "")
        assert len(json.loads(ran.out)["ttfts"]) == 2
        assert served.scripts == []


def test_some_failures_are_a_warning(cli: Cli) -> None:
    """8.4, 4. A warm-up that fails is told, and counts nowhere."""
    with other(BROKEN, BROKEN, GOOD, GOOD) as served:
        ran = cli(*words(served, 3, "--json"))
    assert ran.code == 0, ran.err
    assert (json.loads(ran.out)["completed"], json.loads(ran.out)["failed"]) == (2, 1)
    assert "warning: a warm-up failed: status 500: it broke" in ran.err
    assert "failed: status 500: it broke" in ran.err
    assert "warning: 1 of 3 requests failed" in ran.err


def test_some_failures_are_an_error_with_fail_on_error(cli: Cli) -> None:
    with other(BROKEN, GOOD) as served:
        ran = cli(*words(served, 2, "--num-warmups", 0, "--json", "--fail-on-error"))
    assert ran.code == 3
    assert "error: 1 of 2 requests failed; the first: status 500: it broke\nhint: " in ran.err
    assert json.loads(ran.out)["completed"] == 1, "what was measured is printed all the same"


def test_nothing_but_failures_is_an_error(cli: Cli) -> None:
    """8.4, 4; ten messages are shown."""
    with other(*[BROKEN] * 12) as served:
        ran = cli(*words(served, 12, "--num-warmups", 0))
    assert ran.code == 3
    assert ran.err.count("failed: status 500: it broke\n") == 10
    assert "failed: 2 more" in ran.err
    assert "error: 12 of 12 requests failed" in ran.err


def test_an_endpoint_without_usage(cli: Cli) -> None:
    whole: Script = [(0.0, b"HTTP/1.1 200 OK\r\n\r\n" + text("a") + text("b") + text("", "stop") + DONE)]
    with other(whole, whole) as served:
        found = json.loads(cli(*words(served, 1, "--json", "--random-input-len", 30)).out)
    assert (found["count_source"], found["length_source"]) == ("chunks", "words")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 2)


def test_a_server_that_is_not_there(cli: Cli) -> None:
    with closed_port() as port:
        ran = cli("bench", "serve", "--port", port)
        assert ran.code == 3
        assert ran.err.count("error: ") == 1
        assert "Traceback" not in ran.err
        assert cli("bench", "serve", "--port", port, "--model", "m", "--num-prompts", 2, "-q").code == 3


# --- our own server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """It says the prompt. Its queue holds what its rows do not."""
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    settings = ServerSettings(max_queue_depth=64, api_keys=(KEY,))
    with running(model, settings, max_num_seqs=8) as made:
        yield made
        assert made.idle()


def open_gate_to(server: ScriptServer, requests: int) -> None:
    """So many are there before any of them is answered, however slowly they come."""
    try:
        until(lambda: len(server.state.requests) >= requests)
    finally:
        GATE.open.set()


@pytest.mark.parametrize("kind", ["openai", "openai-chat"])
def test_64_at_once(cli: Cli, server: ScriptServer, tmp_path: Path, kind: str) -> None:
    """8.4, 7: every reply has the tokens that were asked for, and none fails."""
    more: tuple[object, ...] = ("--random-input-len", 60, "--random-output-len", 12)
    if kind == "openai-chat":
        lines = [
            {"messages": [{"role": "user", "content": f"<<{place:20}>>"}], "output_len": 12} for place in range(64)
        ]
        file = tmp_path / "asked.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        more = ("--endpoint-type", kind, "--dataset", file)
    asked = ("--num-prompts", 64, "--num-warmups", 0, "--save-detailed", "--json", *more)
    GATE.shut()
    opening = threading.Thread(target=open_gate_to, args=(server, 64))
    opening.start()
    ran = cli("bench", "serve", "--port", server.port, *asked, OPENAI_API_KEY=KEY)
    opening.join()
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["completed"], found["failed"]) == (64, 0), ran.err
    assert found["output_lens"] == [12] * 64
    assert found["finish_reasons"] == {"length": 64}
    assert set(found["input_lens"]) == {60} if kind == "openai" else min(found["input_lens"]) > 24
    assert found["max_concurrent_requests"] == 64
    assert all(len(gaps) == 11 for gaps in found["itls"]), "a chunk a token"


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_named_nowhere(cli: Cli, server: ScriptServer) -> None:
    ran = cli("bench", "serve", "--port", server.port, "-vv", OPENAI_API_KEY="sk-a-wrong-one")
    assert ran.code == 3
    assert "sk-a-wrong-one" not in ran.out + ran.err


def test_keys_appear_nowhere(cli: Cli, tmp_path: Path) -> None:
    """8.4, 9: neither in results nor on the screen, although the server quotes what it was sent."""
    quoting = refusal(401, f'{{"error": {{"message": "{KEY} and {KEY[::-1]} are no keys"}}}}'.encode())
    told: Script = [(0.0, b"HTTP/1.1 200 OK\r\n\r\n" + event({"error": {"message": f"no {KEY}"}}))]
    file = tmp_path / "result.json"
    with other(quoting, quoting, told, GOOD) as served:
        header = ("--header", f"X-Secret=Token {KEY[::-1]}", "--header", "X-Kind=e")
        ran = cli(*words(served, 3, "-vv", "--save-result", file, "--save-detailed", *header), OPENAI_API_KEY=KEY)
    assert ran.code == 0, ran.err
    for secret in (KEY, KEY[::-1]):
        assert secret not in ran.out + ran.err + file.read_text()
    assert "status 401: *** and *** are no keys" in ran.err
    assert all(heard["Authorization"] == f"Bearer {KEY}" for heard in served.heard)
    assert all(heard["X-Secret"] == f"Token {KEY[::-1]}" for heard in served.heard)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no list of processes here")
def test_a_key_of_the_variable_is_in_no_list_of_processes() -> None:
    """8.4, 9: looked at while the load runs."""
    seen: list[bytes] = []

    def look() -> None:
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.append(process.read_bytes())
            except OSError:
                continue  # it has ended

    with other(GOOD, GOOD) as served:
        served.look = look
        command = [sys.executable, "-m", "mlxcel", *map(str, words(served, 1, "--model", "m", "--json"))]
        done = subprocess.run(
            command, env={**os.environ, "OPENAI_API_KEY": KEY}, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert any(b"bench\0serve" in line for line in seen)
    assert not any(KEY.encode() in line for line in seen)
    assert served.heard[0]["Authorization"] == f"Bearer {KEY}"


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: tuple[tuple[tuple[object, ...], tuple[str, ...]], ...] = (
    (("--base-url", "http://x", "--port", 1), ("--base-url", "--port")),
    (("--base-url", "ftp://x"), ("ftp://x",)),
    (("--base-url", "http://u:secret@x"), ("password",)),
    (("--base-url", "http://a..b"), ("'http://a..b' is no URL",)),
    (("--request-rate", "0"), ("--request-rate", "'0'")),
    (("--request-rate", "nan"), ("inf or a number above 0",)),
    (("--burstiness", "0"), ("--burstiness",)),
    (("--num-prompts", 0), ("--num-prompts",)),
    (("--max-concurrency", 0), ("--max-concurrency",)),
    (("--timeout", "0"), ("--timeout",)),
    (("--random-range-ratio", "1.5"), ("from 0 to 1",)),
    (("--percentile-metrics", "ttft,xyz"), ("ttft, tpot, itl, e2el",)),
    (("--metric-percentiles", "101"), ("from 0 to 100",)),
    (("--goodput", "itl:5"), ("ttft, tpot or e2el",)),
    (("--goodput", "ttft:5", "tpot:x"), ("'tpot:x' is no bound",)),
    (("--goodput", "ttft:5", "ttft:6"), ("twice",)),
    (("ttft:5",), ("unexpected argument 'ttft:5'",)),
    (("--extra-body", '{"stream": false}'), ("without stream, prompt and messages",)),
    (("--extra-body", "[1]"), ("a JSON object",)),
    (("--header", "Host=x"), ("--header",)),
    (("--header", "a b=c"), ("--header",)),
    (("--header", "a=b\r\nc: d"), ("--header",)),
    (("--header", "Authorization=x", "--api-key", "k"), ("--api-key", "--header")),
    (("--endpoint", "v1"), ("begins with /",)),
    (("--dataset", "FILE", "--random-input-len", 3), ("--dataset FILE", "--random-input-len")),
    (("--save-detailed",), ("--save-result FILE or --json",)),
    (("--save-result", "/nowhere/at/all/x.json"), ("there is no folder",)),
    (("--backend", "openai"), ("--backend has no effect here", "--endpoint-type")),
    (("--device", "cpu"), ("--device has no effect here",)),
    (("--offline", "--base-url", "http://example.org"), ("another machine",)),
    (("--tokenizer", "/nowhere", "--model", "m"), ("--tokenizer",)),
    (("--dataset", "/nowhere", "--model", "m"), ("--dataset",)),
)


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_what_cannot_be_obeyed_is_refused(cli: Cli, given: tuple[object, ...], says: tuple[str, ...]) -> None:
    """Before anything is sent: at the address that is usual there may be a server."""
    ran = cli("bench", "serve", *given)
    assert (ran.code, ran.out) == (2, ""), ran.err
    assert ran.err.count("error: ") == 1, ran.err
    assert ran.err.count("hint: ") == 1
    for each in says:
        assert each in ran.err


def test_nothing_is_written_over(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("mine")
    ran = cli("bench", "serve", "--save-result", file)
    assert ran.code == 2
    assert "is there already" in ran.err
    assert file.read_text() == "mine"


def test_flags_make_the_request(cli: Cli) -> None:
    """Each under the name that OpenAI has for it; --extra-body goes before the others."""
    with other(GOOD, GOOD, GOOD) as served:
        plain = ("--num-warmups", 0, "--json", "--random-input-len", 3, "--random-output-len", 5)
        assert cli(*words(served, 1, *plain)).code == 0
        flags = ("--temperature", "0.5", "--top-p", "0.9", "--no-ignore-eos", "--model", "named")
        extra = ("--extra-body", '{"min_tokens": 2, "top_p": 0.8}', "--goodput", "ttft:60000", "tpot:60000")
        ran = cli(*words(served, 1, *plain, *flags, *extra))
        assert json.loads(ran.out)["request_goodput"] > 0
        ran = cli(*words(served, 1, *plain, "--endpoint-type", "openai-chat", "--endpoint", "/v1/completions"))
        assert ran.code == 0, ran.err
    usual = {"stream": True, "stream_options": {"include_usage": True}}
    (first, prompt), (second, _), (third, messages) = ((body, body.pop("prompt", None)) for body in served.bodies)
    assert first == {"model": "theirs", "max_tokens": 5, "temperature": 0, "ignore_eos": True, **usual}
    assert len(prompt.split()) == 3
    assert second == {"model": "named", "max_tokens": 5, "temperature": 0.5, "top_p": 0.8, "min_tokens": 2, **usual}
    assert messages is None
    (turn,) = third.pop("messages")
    assert turn == {"role": "user", "content": turn["content"]}
    assert len(turn["content"].split()) == 3
    assert third == {"model": "theirs", "max_completion_tokens": 5, "temperature": 0, "ignore_eos": True, **usual}


def test_a_header_goes_before_the_variable(cli: Cli) -> None:
    with other(GOOD) as served:
        how = ("--num-warmups", 0, "--header", "authorization=Basic x")
        assert cli(*words(served, 1, *how), OPENAI_API_KEY=KEY).code == 0
    assert [heard["Authorization"] for heard in served.heard] == ["Basic x"] * 3, "models, the load, the version"


def modules_of(*asked: object) -> tuple[set[str], str]:
    """Packages that the program imports, and what it prints, in a process of its own."""
    script = f"import sys; from mlxcel.cli.main import main; main({[*map(str, asked)]!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    *said, modules = done.stdout.splitlines()
    return {name.split(".")[0] for name in modules.split()}, "\n".join(said)


def test_help_imports_no_engine() -> None:
    modules, said = modules_of("bench", "serve", "--help")
    assert "--base-url" in said
    heavy = {"jax", "numpy", "rich", "msgspec", "starlette", "hypercorn", "tokenizers", "asyncio"}
    assert modules & heavy == set()


def test_a_load_needs_neither_jax_nor_numpy() -> None:
    with other(GOOD, GOOD) as served:
        modules, said = modules_of(*words(served, 1, "-q"))
    assert "requests completed" in said
    assert modules & {"jax", "numpy", "starlette", "hypercorn"} == set()


def test_every_flag_is_documented() -> None:
    """With its default, in the words of --help."""
    page = PAGE.read_text(encoding="utf-8")
    for flag in FLAGS:
        metavar = flag.kind.metavar.replace("|", "\\|")
        assert f"| `{flag.flags[0]} {metavar}` | {flag.default} | {flag.help} |" in page
