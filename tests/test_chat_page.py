"""The chat page in a real browser (docs/spec/clients.md chapter 4), against a server whose answers the tests write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from other_threads import comes_to
from page_browser import Visit, ready, words
from page_server import PageServer
from playwright.sync_api import expect

from mlxcel.server.page_routes import POLICY, files


@pytest.fixture
def server(page_server: PageServer) -> PageServer:
    return page_server


# --- 1. a reply -------------------------------------------------------------------------------------------------------


def test_a_reply_grows_and_its_figures_are_those_of_the_pages_clock(
    server: PageServer, visits: Callable[..., Visit]
) -> None:
    visit = ready(visits(server, clock=True))
    visit.at(1000)
    visit.ask("hello")
    expect(visit.button("Stop")).to_be_visible()
    visit.at(1250)
    server.say("One", 1)
    expect(visit.reply).to_have_text("One")
    assert words(visit) == ["first after 250 ms", "prompt 21 (16 cached)", "generated 1"]
    visit.at(2250)
    server.say(" two", 11)
    expect(visit.reply).to_have_text("One two")
    assert words(visit)[0] == "10.0 tokens/s"
    visit.at(9000)  # the end of the text is not a token
    server.finish(11)
    expect(visit.figures.last).to_have_text("finished")
    assert words(visit) == ["10.0 tokens/s", "first after 250 ms", "prompt 21 (16 cached)", "generated 11", "finished"]
    expect(visit.button("Stop")).to_be_hidden()
    assert server.hung_up == 0


ENDINGS = [
    ("max_tokens", None, "token limit reached"),
    ("stop_string", "END", "ended at “END”"),
    ("stop_token", 7, "ended at a stop token"),
    ("context", None, "context is full"),
    ("loop", {"period": 2, "count": 12}, "ended: it was repeating itself"),
    ("my_own_step", None, "my own step"),
]


def test_the_ending_is_told_in_words(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    for at, (cause, stop, said) in enumerate(ENDINGS):
        visit.ask("hello")
        expect(visit.messages).to_have_count(2 * at + 2)
        server.say("text", 1)
        server.finish(1, cause, stop, warnings=[f"top_k does nothing here, {at}"])
        expect(visit.figures.last).to_have_text(f"top_k does nothing here, {at}")
        assert words(visit)[-2] == said
        assert not any("tokens/s" in word for word in words(visit)), "one token has no rate"


def test_thinking_is_apart_from_the_reply(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    visit.ask("why")
    expect(visit.button("Stop")).to_be_visible()
    server.say("", 1, reasoning_content="Let me see.")
    expect(visit.messages.last.locator(".thought")).to_have_text("Let me see.")
    server.say("Because.", 2)
    server.finish(2)
    expect(visit.reply).to_have_text("Because.")
    expect(visit.messages.last.locator(".thought")).to_be_hidden()
    server.answer = "Again."
    visit.ask("and?")
    expect(visit.reply).to_have_text("Again.")
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Because."}


CUTS = """
async ([bytes, at]) => {
  const { events } = await import("./assets/sse.js");
  const parts = [bytes.slice(0, at), bytes.slice(at)].map((part) => new Uint8Array(part));
  const found = [];
  const start = (it) => {
    for (const part of parts) it.enqueue(part);
    it.close();
  };
  for await (const data of events(new ReadableStream({ start }))) found.push(data);
  return found;
}
"""


def test_events_are_read_however_they_are_cut(server: PageServer, visits: Callable[..., Visit]) -> None:
    """Of the HTML standard's event streams: three line ends, comments, other fields, several lines of data."""
    visit = ready(visits(server))
    stream = ": keep-alive\n\ndata: ä\r\n\r\nevent: x\ndata:{\ndata:  b}\n\n\ndata: c\r\rid: 7\n\ndata: cut short"
    sent = list(stream.encode())
    for at in range(len(sent) + 1):
        assert visit.page.evaluate(CUTS, [sent, at]) == ["ä", "{\n b}", "c"], at


# --- 2. stop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_closes_the_connection_and_keeps_the_text(
    server: PageServer, visits: Callable[..., Visit], way: str
) -> None:
    visit = ready(visits(server))
    visit.ask("count")
    expect(visit.button("Stop")).to_be_visible()
    server.say("1 2 3", 3)
    expect(visit.reply).to_have_text("1 2 3")
    visit.button("Stop").click() if way == "button" else visit.page.keyboard.press("Escape")
    expect(visit.figures.last).to_have_text("stopped by you")
    assert "generated 3" in words(visit)
    server.answer = "fine"
    visit.ask("go on")
    expect(visit.reply).to_have_text("fine")
    comes_to(lambda: server.hung_up, 1)
    assert server.bodies[1]["messages"][1]["content"] == "1 2 3"


# --- 3. one origin, no violation --------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(server: PageServer, visits: Callable[..., Visit]) -> None:
    """Every feature that could want a script, a style or an address; the fixture looks at what was asked for."""
    server.answer = (
        "# Title\n\n- one\n- **two** and `three`\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    visit = ready(visits(server))
    expect(visit.page.locator("#model")).to_have_text("tiny-llama")
    expect(visit.page.locator("#machine")).to_have_text("reference-numpy · cpu")
    visit.ask("show me")
    expect(visit.figures.last).to_have_text("finished")
    visit.settings()
    visit.setting("Temperature").fill("1")
    with visit.page.expect_download() as download:
        visit.button("Export as JSON").click()
    assert download.value.suggested_filename.endswith(".json")
    assert visit.complaints == []
    assert {url.removeprefix(server.url) for url in visit.requests} >= {"", "health", "props", "v1/models"}


def test_the_page_is_small_and_names_no_other_place() -> None:
    """Chapter 4: under 200 KB, no outside script, font, image or request; the CSP allows no inline script or style."""
    assert sum(len(file.content) for file in files().values()) < 200_000
    for name, file in files().items():
        text = file.content.decode()
        assert "innerHTML" not in text, name
        assert "insertAdjacentHTML" not in text, name
        addresses = [word for word in text.split() if "://" in word and "www.w3.org/2000/svg" not in word]
        assert all("spec.whatwg.org" in word for word in addresses), (name, addresses)
    assert "unsafe" not in POLICY


# --- 4. keys ----------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_kept_in_the_tab_and_never_exported(
    server: PageServer, visits: Callable[..., Visit], tmp_path: Path
) -> None:
    server.key = "sk-right-key"
    server.answer = "Hello."
    visit = visits(server)
    dialog = visit.page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("This server asks for an API key.")
    visit.setting("Key").fill("schlüssel")
    visit.setting("Key").press("Enter")
    expect(dialog).to_contain_text("printable ASCII")
    visit.setting("Key").fill("sk-wrong")
    visit.button("Use this key").click()
    expect(dialog).to_contain_text("The server did not accept the key.")
    visit.setting("Key").fill("sk-right-key")
    visit.setting("Key").press("Enter")
    expect(dialog).to_be_hidden()
    expect(visit.page.locator("#model")).to_have_text("tiny-llama")
    visit.ask("hi")
    expect(visit.reply).to_have_text("Hello.")
    visit.page.reload()
    expect(visit.page.locator("#model")).to_have_text("tiny-llama")
    expect(dialog).to_be_hidden()
    with visit.page.expect_download() as download:
        visit.button("Export as JSON").click()
    download.value.save_as(tmp_path / "chat.json")
    text = (tmp_path / "chat.json").read_text()
    assert [message["content"] for message in json.loads(text)["messages"]] == ["hi", "Hello."]
    assert "right-key" not in text
    assert "right-key" not in str(visit.page.evaluate("JSON.stringify(localStorage)"))
    assert not any("right-key" in url for url in visit.requests)
    other = visit.page.context.new_page()
    other.goto(server.url)
    expect(other.get_by_role("dialog", name="API key")).to_be_visible()


def test_a_key_can_be_given_when_a_message_needs_it(server: PageServer, visits: Callable[..., Visit]) -> None:
    server.key = "later"
    server.answer = "Hello."
    visit = visits(server)
    visit.button("Not now").click()
    visit.ask("hi")
    visit.setting("Key").fill("later")
    visit.button("Use this key").click()
    expect(visit.reply).to_have_text("Hello.")
    expect(visit.page.locator("#model")).to_have_text("tiny-llama")
    assert len(server.bodies) == 1


# --- 5. text is text --------------------------------------------------------------------------------------------------

HOSTILE = [
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'><a href='javascript:window.ran = 1'>x</a></svg>",
    "[link](javascript:window.ran=1) ![image](http://other.example/x.png)",
    "`<b onclick=alert(1)>` **<i>bold</i>** *</li></ol><h1>out*",
    "</textarea></template><iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
]


def test_markup_of_a_model_is_shown_as_text(server: PageServer, visits: Callable[..., Visit]) -> None:
    lines = [*HOSTILE, *(f"# {text}" for text in HOSTILE), *(f"- {text}" for text in HOSTILE)]
    code = "".join(f"\n\n```{text.replace('`', '')}\n{text}\n```" for text in HOSTILE)
    server.answer = "\n\n".join(lines) + code
    visit = ready(visits(server))
    visit.ask(HOSTILE[0])
    expect(visit.figures.last).to_have_text("finished")
    expect(visit.messages.first.locator(".text")).to_have_text(HOSTILE[0])
    shown = visit.reply.inner_text()
    for text in HOSTILE[:4]:
        assert shown.count(text) == 5 - (text in code) + ("`" not in text), text
    made = visit.reply.evaluate("it => [...new Set([...it.querySelectorAll('*')].map((one) => one.localName))].sort()")
    allowed = {"button", "code", "em", "figcaption", "figure", "h4", "li", "p", "pre", "span", "strong", "ul"}
    assert set(made) <= allowed
    named = "it => [...it.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())"
    assert set(visit.reply.evaluate(named)) <= {"class", "data-action", "tabindex"}
    assert visit.page.evaluate("window.ran") is None


PLAIN = [
    ("2 * 3 * 4 and a*b*c, 2**8", "2 * 3 * 4 and a*b*c, 2**8"),
    ("open ** and ` and *", "open ** and ` and *"),
    ("3. three\n5. five", "three\nfive"),
    ("line one\n  line two", "line one\n  line two"),
    ("```\nnever closed\n  kept", "Copy\nnever closed\n  kept"),
    ("snake_case_name and __init__", "snake_case_name and __init__"),
    ("| not | a table |", "| not | a table |"),
]


def test_what_is_no_markup_stays(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    for at, (text, shown) in enumerate(PLAIN):
        server.answer = text
        visit.ask("x")
        expect(visit.messages).to_have_count(2 * at + 2)
        expect(visit.figures.last).to_have_text("finished")
        assert visit.reply.inner_text().strip() == shown
        numbers = visit.reply.locator("li").evaluate_all("items => items.map((item) => item.value)")
        assert numbers == ([3, 5] if text.startswith("3.") else [])
