"""The chat page with the server that it is made for, whose model says what stands between << and >>."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import script_plugin
from other_threads import PATIENCE, comes_to
from page_browser import Visit, launched, visiting
from playwright.sync_api import Browser, expect
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.settings import ServerSettings

KEY = "sk-of-the-test"


class Turnstile:
    """Lets so many forwards through as it is told, and counts them."""

    def __init__(self, steps: int) -> None:
        self.steps = threading.Semaphore(steps)
        self.passed = 0

    def wait(self) -> None:
        self.steps.acquire()
        self.passed += 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[ScriptServer]:
    with running(tiny, ServerSettings(api_keys=(KEY,))) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser, served: ScriptServer) -> Iterator[Visit]:
    """A tab that gave its key; a 401 is all that the console may have heard."""
    with visiting(browser) as context:
        visit = Visit(context.new_page()).open(served.url)
        visit.setting("Key").fill(KEY)
        visit.setting("Key").press("Enter")
        expect(visit.page.locator("#model")).to_have_text("tiny")
        yield visit
        assert all(url.startswith((served.url, "data:", "blob:")) for url in visit.requests)
        assert [text for text in visit.complaints if "401" not in text] == []


def test_the_page_and_the_log_agree(served: ScriptServer, visit: Visit, caplog: pytest.LogCaptureFixture) -> None:
    """clients 4.1, 1: its counts are those of the request's line."""
    expect(visit.page.locator("#machine")).to_have_text("script · script")
    with caplog.at_level(logging.INFO, "mlxcel.access"):
        for number, generated in enumerate((5, 5), 1):
            visit.button("New chat").click()
            visit.ask("<<Good.>>")
            expect(visit.figures.last).to_have_text("finished")
            expect(visit.reply).to_have_text("Good.")
            comes_to(lambda: len(chat_lines(caplog)), number)
            line = dict(word.split("=", 1) for word in chat_lines(caplog)[-1].split() if "=" in word)
            cached = f" ({line['cached']} cached)" if line["cached"] != "0" else ""
            assert visit.figures.all_inner_texts()[-3:] == [
                f"prompt {line['prompt']}{cached}", f"generated {line['generated']}", "finished",
            ]  # fmt: skip
            assert (int(line["generated"]), line["cause"]) == (generated, "eos")
    assert KEY not in caplog.text


def chat_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "/v1/chat/completions" in text]


def test_stop_ends_the_row_within_two_steps(
    served: ScriptServer, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clients 3.6, 4.1, 2: and its pages are back, and the next message is answered."""
    gate = Turnstile(8)
    with monkeypatch.context() as patch:
        patch.setattr(script_plugin, "GATE", gate)
        visit.ask("<<1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20>>")
        expect(visit.reply).to_contain_text("1 2 3")
        visit.button("Stop").click()
        expect(visit.figures.last).to_have_text("stopped by you")
        served.heard_hang_ups()  # the model stands still meanwhile
        passed = gate.passed
        gate.steps.release(100)
        assert served.idle()
        assert gate.passed - passed <= 2
    expect(visit.reply).to_contain_text("1 2 3")
    visit.button("New chat").click()
    visit.ask("<<Good.>>")
    expect(visit.reply).to_have_text("Good.")


def test_every_setting_reaches_the_server(served: ScriptServer, visit: Visit) -> None:
    """Each field under the name that the server knows, and its value: what it cannot be is refused by that name."""
    request = urllib.request.Request(f"{served.url}/props", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        params = json.load(reply)["default_generation_settings"]["params"]
    visit.settings()
    refused = {"Temperature": "-1", "Top-k": "-7", "Top-p": "2", "Min-p": "2", "Max tokens": "-5", "Seed": "-9"}
    refused |= {"Repetition penalty": "-1", "Stop strings, one a line": "x\n" * 65}
    names = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "repetition_penalty", "stop"]
    for (label, text), name in zip(refused.items(), names, strict=True):
        shown = visit.setting(label).get_attribute("placeholder")
        assert shown, label
        if name == "temperature":
            assert float(shown) == params[name]
        visit.setting(label).fill(text)
        visit.ask("hello")
        fault = visit.messages.last.get_by_role("alert")
        expect(fault).to_contain_text(name)
        expect(fault).to_contain_text("status 400")
        visit.setting(label).fill("")
    visit.complaints[:] = [text for text in visit.complaints if "400" not in text]


ELSEWHERE = """async server => {
    const body = new Blob(['{"prompt": "<<ab>>"}']);
    for (const path of ["/v1/completions", "/v1/cache/reset"])
        await fetch(server + path, {method: "POST", mode: "no-cors", body});
    return (await fetch(server + "/v1/completions", {method: "POST", body: "{}"}).catch(error => error)).message;
}"""


class Empty(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def elsewhere() -> Iterator[str]:
    """A page of another origin, which is on this machine so that the browser lets it talk to this machine at all."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}/"
        finally:
            made.shutdown()
            thread.join()


def test_a_page_from_elsewhere_has_nothing_done(browser: Browser, tiny: Path) -> None:
    """clients 3.7: what a browser sends for any page, without asking, to a server without keys."""
    settings = ServerSettings(allowed_origins=("https://some.example",))
    with running(tiny, settings) as server, elsewhere() as other, visiting(browser) as context:
        page = context.new_page()
        page.goto(other)
        assert "fetch" in page.evaluate(ELSEWHERE, server.url)
        server.done()
        assert server.state.metrics.requests == {("/v1/completions", 403): 2, ("/v1/cache/reset", 403): 1}
        assert server.serving.stats()["scheduler"]["request_started_total"] == 0


@pytest.mark.slow
def test_the_default_model_answers(browser: Browser, smollm2_path: Path) -> None:
    with running(smollm2_path, backend="reference-numpy") as server, visiting(browser) as context:
        visit = Visit(context.new_page()).open(server.url)
        expect(visit.state).to_have_text("Ready")
        visit.settings()
        visit.setting("Max tokens").fill("8")
        visit.setting("Temperature").fill("0")
        visit.ask("Say hello.")
        expect(visit.figures.last).to_have_text("token limit reached", timeout=60_000)
        assert "generated 8" in visit.figures.all_inner_texts()
        assert visit.reply.inner_text().strip()
        assert visit.complaints == []


def test_what_is_exported_is_what_was_said(served: ScriptServer, visit: Visit, tmp_path: Path) -> None:
    visit.ask("<<Good.>>")
    expect(visit.figures.last).to_have_text("finished")
    with visit.page.expect_download() as download:
        visit.button("Export as JSON").click()
    download.value.save_as(tmp_path / "chat.json")
    said = json.loads((tmp_path / "chat.json").read_text())
    assert [message["content"] for message in said["messages"]] == ["<<Good.>>", "Good."]
    assert (said["format"], said["version"], said["model"]) == ("mlxcel-chat", 1, "tiny")
    assert KEY not in (tmp_path / "chat.json").read_text()


def fetched(url: str) -> tuple[int, Message]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
            return reply.status, reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def test_the_page_is_served_as_it_must_be(served: ScriptServer) -> None:
    """clients 3.7, 3.12, 4: open without a key, with its policy, and nothing beside its files."""
    for path, kind in (("/", "text/html"), ("/assets/page.js", "text/javascript"), ("/assets/page.css", "text/css")):
        status, headers = fetched(served.url + path)
        assert (status, headers.get_content_type()) == (200, kind)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    for name in ("../app.py", "%2e%2e/app.py", "%2e%2e%2fapp.py", "nothing.js", ""):
        assert fetched(f"{served.url}/assets/{name}")[0] in (401, 404)
