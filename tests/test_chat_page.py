"""The chat page in a real browser (docs/spec/clients.md chapter 4), against a server whose answers the tests write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from page_browser import Visit, launched, visiting
from page_server import DRAINING, FULL, LOADING, UNHEALTHY, PageServer, Refused
from playwright.sync_api import Browser, expect

from mlxcel.server.page_routes import POLICY, files

HEARD = "Failed to load resource"
"""How the console reports a status above 399; it is no fault of the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer().start()
    yield server
    server.stop()


@pytest.fixture
def visits(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Each call is another profile; whatever a test does, the page asks nobody but its own server, and no error of its
    own reaches the console."""
    with ExitStack() as stack:
        made: list[Visit] = []

        def visit(server: PageServer, *, clock: bool = False, width: int = 1280, dark: bool = False) -> Visit:
            context = stack.enter_context(visiting(browser, width=width, dark=dark))
            made.append(Visit(context.new_page()))
            return made[-1].open(server.url, clock=clock)

        yield visit
        for it in made:
            origins = {url.split("/")[2] for url in it.requests if not url.startswith(("data:", "blob:"))}
            assert len(origins) == 1
            assert origins.pop().startswith("127.0.0.1:")
            assert [text for text in it.complaints if not text.startswith(HEARD)] == []


def ready(visit: Visit) -> Visit:
    expect(visit.state).to_have_text("Ready")
    expect(visit.input).to_be_enabled()
    return visit


def words(visit: Visit) -> list[str]:
    return visit.figures.all_inner_texts()


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
    assert server.hung_up == 1
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


# --- 6. faults --------------------------------------------------------------------------------------------------------


def test_a_loading_server_enables_the_page_by_itself(server: PageServer, visits: Callable[..., Visit]) -> None:
    server.health = LOADING
    visit = visits(server)
    expect(visit.state).to_have_text("Loading the model")
    expect(visit.input).to_be_disabled()
    server.health = None
    ready(visit)


def test_a_server_that_ends_or_has_failed_says_so(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    server.health = DRAINING
    server.refusals.append(DRAINING)
    visit.ask("hello")
    expect(visit.state).to_have_text("Shutting down")
    expect(visit.button("Send")).to_be_disabled()
    server.health = UNHEALTHY
    expect(visit.state).to_have_text("Failed")
    expect(visit.page.locator("#state")).to_have_attribute("title", "Engine unhealthy")


def test_a_full_server_is_tried_again_when_it_said(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    server.refusals.append(FULL)
    server.answer = "Here I am."
    visit.ask("hello")
    fault = visit.messages.last.get_by_role("alert")
    expect(fault).to_contain_text("2 requests are waiting, the queue holds 2")
    expect(fault).to_contain_text("status 503 · request req-refused")
    expect(visit.state).to_have_text("Busy")
    button = fault.get_by_role("button")
    expect(button).to_be_disabled()
    expect(button).to_have_text("Retry in 2 s")
    expect(button).to_have_text("Retry")
    button.click()
    expect(visit.reply).to_have_text("Here I am.")
    assert server.bodies[0] == server.bodies[1]
    ready(visit)


def test_an_error_in_mid_stream_keeps_what_came(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    visit.ask("hello")
    expect(visit.button("Stop")).to_be_visible()
    server.say("Half a", 2)
    server.event({"error": {"message": "row 3 failed: NaN in the logits", "type": "server_error", "code": "numeric"}})
    server.cut()
    fault = visit.messages.last.get_by_role("alert")
    expect(fault).to_contain_text("row 3 failed: NaN in the logits")
    expect(fault).to_contain_text("request req-0001")
    expect(visit.reply).to_have_text("Half a")
    server.answer = "Whole."
    visit.button("Retry").click()
    expect(visit.reply).to_have_text("Whole.")
    expect(visit.messages).to_have_count(2)


def test_a_connection_that_ends_early_is_no_finish(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    visit.ask("hello")
    expect(visit.button("Stop")).to_be_visible()
    server.say("Half a", 2)
    server.cut()
    expect(visit.messages.last.get_by_role("alert")).to_contain_text("closed before the reply was complete")
    assert "finished" not in words(visit)


@pytest.mark.parametrize("status", [400, 500])
def test_a_refusal_is_shown_in_the_servers_words(server: PageServer, visits: Callable[..., Visit], status: int) -> None:
    visit = ready(visits(server))
    server.refusals.append(Refused(status, "<b>top_p</b> is 7: it goes from 0 to 1"))
    visit.ask("hello")
    expect(visit.messages.last.get_by_role("alert")).to_contain_text("<b>top_p</b> is 7: it goes from 0 to 1")
    expect(visit.button("Retry")).to_be_enabled()
    expect(visit.state).to_have_text("Ready")


def test_a_restart_of_the_server_is_survived(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    visit.ask("hello")
    expect(visit.button("Stop")).to_be_visible()
    server.say("Half a", 2)
    expect(visit.reply).to_have_text("Half a")
    server.stop()
    expect(visit.state).to_have_text("Unreachable")
    visit.input.fill("kept while the server is away")
    expect(visit.button("Send")).to_be_disabled()
    again = PageServer(port=server.port, answer="Back.").start()
    try:
        expect(visit.state).to_have_text("Ready")
        visit.button("Send").click()
        expect(visit.reply).to_have_text("Back.")
        assert [message["content"] for message in again.bodies[0]["messages"]] == [
            "hello", "Half a", "kept while the server is away",
        ]  # fmt: skip
    finally:
        again.stop()


# --- 7. what is sent --------------------------------------------------------------------------------------------------

ALWAYS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_only_what_was_changed_is_sent(server: PageServer, visits: Callable[..., Visit]) -> None:
    server.answer = "ok"
    visit = ready(visits(server))
    visit.ask("plain")
    expect(visit.reply).to_have_text("ok")
    assert server.bodies[0] == {**ALWAYS, "messages": said(("user", "plain"))}
    visit.settings()
    placeholders = [visit.setting(name).get_attribute("placeholder") for name in ("Top-p", "Seed", "Max tokens")]
    assert placeholders == ["0.95", "random", "to the end"]
    visit.setting("System message").fill("Be brief.")
    given = {"Temperature": "0.25", "Top-k": "0", "Top-p": "1", "Min-p": "0", "Max tokens": "12", "Seed": "7"}
    given |= {"Repetition penalty": "1.1", "Stop strings, one a line": "END\n\\n\\n"}
    for name, text in given.items():
        visit.setting(name).fill(text)
    visit.button("New chat").click()
    visit.ask("all of it")
    expect(visit.reply).to_have_text("ok")
    values = {"temperature": 0.25, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 12, "seed": 7}
    values |= {"repetition_penalty": 1.1}
    messages = said(("system", "Be brief."), ("user", "all of it"))
    assert server.bodies[1] == {**ALWAYS, **values, "stop": ["END", "\n\n"], "messages": messages}
    visit.page.reload()
    ready(visit).settings()
    expect(visit.setting("Seed")).to_have_value("7")
    visit.button("Back to the server's values").click()
    visit.button("New chat").click()
    visit.ask("plain again")
    expect(visit.reply).to_have_text("ok")
    assert server.bodies[2] == {**ALWAYS, "messages": said(("user", "plain again"))}


UNREADABLE = [
    ("Temperature", "warm", "This is not a number."),
    ("Temperature", "0,7", "This is not a number."),
    ("Seed", "1e999", "This is not a number."),
    ("Seed", "9007199254740993", "At most 9007199254740991 here."),
    ("Top-k", "1.5", "A whole number is needed."),
]


def test_a_value_that_cannot_be_read_is_not_sent(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    for name, text, fault in UNREADABLE:
        visit.settings()
        visit.setting(name).fill(text)
        expect(visit.page.get_by_text(fault)).to_be_visible()
        visit.settings()
        visit.ask("hello")
        expect(visit.setting(name)).to_be_focused()
        expect(visit.input).to_have_value("hello")
        visit.button("Back to the server's values").click()
        visit.settings()
    assert server.bodies == []


def test_regenerate_edit_and_delete(server: PageServer, visits: Callable[..., Visit]) -> None:
    server.answer = "first"
    visit = ready(visits(server))
    visit.ask("one")
    expect(visit.reply).to_have_text("first")
    server.answer = "second"
    visit.messages.last.get_by_text("Regenerate").click()
    expect(visit.reply).to_have_text("second")
    assert server.bodies[1]["messages"] == said(("user", "one"))
    visit.ask("two")
    expect(visit.messages).to_have_count(4)
    expect(visit.reply).to_have_text("second")
    visit.messages.first.get_by_text("Edit").click()
    visit.setting("Edit the message").fill("uno")
    visit.setting("Edit the message").press("Enter")
    expect(visit.messages).to_have_count(2)
    expect(visit.reply).to_have_text("second")
    assert server.bodies[3]["messages"] == said(("user", "uno"))
    visit.messages.last.get_by_text("Edit").click()
    visit.setting("Edit the message").fill("my words")
    visit.button("Save").click()
    expect(visit.figures).to_have_text(["edited"])
    visit.ask("three")
    expect(visit.reply).to_have_text("second")
    assert server.bodies[4]["messages"] == said(("user", "uno"), ("assistant", "my words"), ("user", "three"))
    visit.messages.first.get_by_text("Delete").click()
    expect(visit.messages).to_have_count(2)
    visit.messages.last.get_by_text("Regenerate").click()
    expect(visit.figures.last).to_have_text("finished")
    assert server.bodies[5]["messages"] == said(("user", "three"))


def test_chats_are_kept_listed_and_cleared(server: PageServer, visits: Callable[..., Visit]) -> None:
    server.answer = "ok"
    visit = ready(visits(server))
    for title in ("alpha", "beta"):
        visit.button("New chat").click()
        visit.ask(title)
        expect(visit.reply).to_have_text("ok")
    visit.page.evaluate("localStorage.setItem('mlxcel.chat.broken', '{\"id\": \"broken\"}')")
    visit.page.reload()
    ready(visit)
    listed = visit.page.locator("#chat-list .open")
    expect(listed).to_have_text(["beta", "alpha"])
    visit.button("alpha").click()
    expect(visit.messages.first).to_contain_text("alpha")
    visit.button("Clear all").click()
    visit.page.get_by_role("dialog").get_by_role("button", name="Clear all").click()
    expect(listed).to_have_count(0)
    expect(visit.messages).to_have_count(0)
    left = visit.page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('mlxcel.chat.'))")
    assert left == []


def test_another_tab_sees_the_chat_and_its_end(server: PageServer, visits: Callable[..., Visit]) -> None:
    server.answer = "ok"
    visit = ready(visits(server))
    other = Visit(visit.page.context.new_page()).open(server.url)
    ready(other)
    visit.ask("shared")
    expect(visit.figures.last).to_have_text("finished")
    expect(other.page.locator("#chat-list .open")).to_have_text(["shared"])
    other.button("shared").click()
    visit.ask("more")
    expect(other.messages).to_have_count(4)
    visit.button("Delete the chat shared").click()
    expect(other.messages).to_have_count(0)
    expect(other.page.locator("#chat-list .open")).to_have_count(0)


def test_without_storage_clipboard_and_secure_origin(server: PageServer, visits: Callable[..., Visit]) -> None:
    """Private windows, and plain http from another machine."""
    server.key = "k"
    server.answer = "```\ncode\n```"
    visit = visits(server)
    visit.page.add_init_script(
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };"
        "delete Navigator.prototype.clipboard; delete Crypto.prototype.randomUUID;"
        "document.execCommand = (command) => { window.copied = document.activeElement.value; return true; };"
    )
    visit.page.reload()
    visit.setting("Key").fill("k")
    visit.button("Use this key").click()
    ready(visit)
    for count in (2, 4):
        visit.ask("again")
        expect(visit.messages).to_have_count(count)
        expect(visit.figures.last).to_have_text("finished")
    expect(visit.page.get_by_text("This browser keeps no more")).to_be_visible()
    visit.reply.get_by_role("button", name="Copy").click()
    expect(visit.reply.get_by_role("button", name="Copied")).to_be_visible()
    assert visit.page.evaluate("window.copied") == "code"


def test_a_chat_that_was_left_is_finished_there(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    visit.ask("first")
    expect(visit.button("Stop")).to_be_visible()
    server.say("Half", 1)
    expect(visit.reply).to_have_text("Half")
    visit.button("New chat").click()
    expect(visit.messages).to_have_count(0)
    server.say(" and whole", 3)
    server.finish(3)
    expect(visit.button("Send")).to_be_visible()
    visit.button("first").click()
    expect(visit.reply).to_have_text("Half and whole")
    expect(visit.figures.last).to_have_text("finished")


# --- 8. every size, every hand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_is_pictured(
    server: PageServer, visits: Callable[..., Visit], tmp_path: Path, width: int, dark: bool
) -> None:
    long = "x" * 300
    server.answer = f"{long}\n\n```\n{long}\n```\n\n| {long} | b |\n|---|---|\n| 1 | 2 |"
    visit = ready(visits(server, width=width, dark=dark))
    visit.ask(long)
    expect(visit.figures.last).to_have_text("finished")
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert visit.page.evaluate(wider) == 0
    assert visit.page.locator("#scroll").evaluate("it => it.scrollWidth - it.clientWidth") == 0
    visit.settings()
    expect(visit.setting("Temperature")).to_be_in_viewport()
    visit.page.screenshot(path=tmp_path / "page.png")
    if width < 860:
        visit.button("Close the settings").click()
        expect(visit.setting("Temperature")).to_be_hidden()
        expect(visit.button("Settings")).to_be_focused()


def test_everything_is_done_by_keyboard(server: PageServer, visits: Callable[..., Visit]) -> None:
    visit = ready(visits(server))
    press = visit.page.keyboard.press
    expect(visit.input).to_be_focused()
    visit.page.keyboard.type("one")
    press("Shift+Enter")
    visit.page.keyboard.type("two")
    press("Enter")
    expect(visit.button("Stop")).to_be_visible()
    assert server.bodies[0]["messages"] == said(("user", "one\ntwo"))
    server.say("Half", 1)
    expect(visit.reply).to_have_text("Half")
    press("Escape")
    expect(visit.page.locator("#said")).to_have_text("Stopped. Half")
    server.answer = "Whole"
    seen = []
    for _ in range(12):
        press("Shift+Tab")
        seen.append(
            visit.page.evaluate("document.activeElement.textContent.trim() || document.activeElement.ariaLabel")
        )
        if seen[-1] == "Regenerate":
            break
    press("Enter")
    expect(visit.reply).to_have_text("Whole")
    expect(visit.page.locator("#said")).to_have_text("Whole")
    assert len(server.bodies) == 2, seen
