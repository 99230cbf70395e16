"""The chat page in a real browser (docs/spec/clients.md chapter 4), faults, what is sent, sizes and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from other_threads import until
from page_browser import Visit, ready, words
from page_server import DRAINING, FULL, LOADING, UNHEALTHY, PageServer, Refused
from playwright.sync_api import expect

pytestmark = pytest.mark.slow


@pytest.fixture
def server(page_server: PageServer) -> PageServer:
    return page_server


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
    visit = ready(visits(server, clock=True))
    server.refusals.append(attrs.evolve(FULL, headers={"Retry-After": "600"}))
    server.answer = "Here I am."
    visit.ask("hello")
    fault = visit.messages.last.get_by_role("alert")
    expect(fault).to_contain_text("2 requests are waiting, the queue holds 2")
    expect(fault).to_contain_text("status 503 · request req-refused")
    expect(visit.state).to_have_text("Busy")
    button = fault.get_by_role("button")
    expect(button).to_be_disabled()
    expect(button).to_have_text("Retry in 600 s")
    visit.at(1000)
    expect(button).to_have_text("Retry in 599 s")
    visit.at(600_000)
    expect(button).to_have_text("Retry")
    visit.rest()
    button.click()
    expect(visit.reply).to_have_text("Here I am.")
    assert server.bodies[0] == server.bodies[1]
    visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
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
    visit.rest()
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
    visit.rest()
    visit.messages.last.get_by_text("Regenerate").click()
    expect(visit.reply).to_have_text("second")
    assert server.bodies[1]["messages"] == said(("user", "one"))
    visit.ask("two")
    expect(visit.messages).to_have_count(4)
    expect(visit.reply).to_have_text("second")
    visit.rest()
    visit.messages.first.get_by_text("Edit").click()
    visit.setting("Edit the message").fill("uno")
    visit.setting("Edit the message").press("Enter")
    expect(visit.messages).to_have_count(2)
    expect(visit.reply).to_have_text("second")
    assert server.bodies[3]["messages"] == said(("user", "uno"))
    visit.rest()
    visit.messages.last.get_by_text("Edit").click()
    visit.setting("Edit the message").fill("my words")
    visit.button("Save").click()
    expect(visit.figures).to_have_text(["edited"])
    visit.ask("three")
    expect(visit.reply).to_have_text("second")
    assert server.bodies[4]["messages"] == said(("user", "uno"), ("assistant", "my words"), ("user", "three"))
    visit.rest()
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
        "const later = setTimeout; window.setTimeout = (call, wait, ...more) => later(call, 100 * wait, ...more);"
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
    visit.rest()
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
    until(lambda: server.bodies)
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
