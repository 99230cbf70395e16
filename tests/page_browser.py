"""A browser that sees nothing but this machine, for the tests of the chat page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from other_threads import PATIENCE

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the chat page's tests need playwright (pip install playwright)"
)
from playwright.sync_api import Browser, BrowserContext, Locator, Page, ViewportSize, expect, sync_playwright  # noqa: E402

expect.set_options(timeout=1000 * PATIENCE)

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CLOCK = "window.pageNow = 0; performance.now = () => window.pageNow; Date.now = () => 1e12 + window.pageNow;"
"""The page's own clocks stand still until `Visit.at` moves them."""
WATCH = "addEventListener('securitypolicyviolation', (it) => console.error('CSP: ' + it.violatedDirective))"


def chromium() -> str:
    """The browser that MLXCEL_TEST_CHROMIUM names, or one on the path; without any the test is skipped."""
    named = os.environ.get("MLXCEL_TEST_CHROMIUM")
    if named:
        if not Path(named).is_file():
            pytest.fail(f"MLXCEL_TEST_CHROMIUM names {named}, which is no file")
        return named
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is on the path (apt install chromium), and MLXCEL_TEST_CHROMIUM names none")
    return found


@contextmanager
def launched() -> Iterator[Browser]:
    """Names of other machines are not resolved. As root Chromium's sandbox does not work."""
    offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    options = [offline, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    program = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()


@attrs.define
class Visit:
    """One tab on the page. `requests` are the addresses it asked for, `complaints` the errors of its console."""

    page: Page
    requests: list[str] = attrs.field(factory=list)
    complaints: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda it: self.complaints.append(it.text) if it.type in ("error", "warning") else None)
        self.page.add_init_script(WATCH)

    def open(self, url: str, *, clock: bool = False) -> Visit:
        if clock:
            self.page.add_init_script(CLOCK)
        self.page.goto(url)
        return self

    def at(self, milliseconds: float) -> None:
        """It is so late on the page's own clocks."""
        self.page.evaluate("time => { window.pageNow = time; }", milliseconds)

    def ask(self, text: str) -> None:
        self.rest()
        self.input.fill(text)
        self.input.press("Enter")

    def rest(self) -> None:
        """Until no reply is being written: what is asked for before is not done. Its last words are shown earlier."""
        expect(self.button("Stop")).to_be_hidden()

    @property
    def input(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message", exact=True)

    @property
    def state(self) -> Locator:
        return self.page.locator("#state-name")

    @property
    def messages(self) -> Locator:
        return self.page.locator("#messages > li")

    @property
    def reply(self) -> Locator:
        """The text of the last message."""
        return self.messages.last.locator(".text")

    @property
    def figures(self) -> Locator:
        return self.messages.last.locator(".figures span")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def setting(self, name: str) -> Locator:
        return self.page.get_by_label(name, exact=True)

    def settings(self) -> None:
        self.button("Settings").click()


@contextmanager
def visiting(browser: Browser, *, width: int = 1280, height: int = 800, dark: bool = False) -> Iterator[BrowserContext]:
    """A browser profile of its own, without anything stored."""
    size: ViewportSize = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", locale="en-GB")
    context.set_default_timeout(1000 * PATIENCE)
    try:
        yield context
    finally:
        context.close()


HEARD = "Failed to load resource"
"""How the console reports a status above 399; it is no fault of the page."""


@contextmanager
def visited(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Each call is another profile; whatever a test does, the page asks nobody but its own server, and no error of its
    own reaches the console."""
    with ExitStack() as stack:
        made: list[Visit] = []

        def visit(server: Any, *, clock: bool = False, width: int = 1280, dark: bool = False) -> Visit:
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
