"""The pictures of docs/server.md: `python tests/page_pictures.py docs/images`. What they show is written here."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
from page_browser import Visit, launched, visiting
from page_server import PageServer

QUESTION = "Why is the sky blue?"
REPLY = """Air scatters **short wavelengths** far more than long ones: by 1/λ⁴, which is Rayleigh's law.

1. Sunlight holds every colour.
2. Blue is scattered about six times as much as red, so it reaches us from everywhere.

```python
def scattered(wavelength, against=700):
    return (against / wavelength) ** 4
```

| colour | nm | scattered |
|---|---|---|
| blue | 450 | 5.9 |
| green | 530 | 3.0 |

Violet is scattered *even more*, but our eyes see little of it.
"""
TOKENS = 168


@attrs.frozen
class Picture:
    name: str
    width: int
    height: int
    dark: bool = False
    settings: bool = False


PICTURES = (
    Picture("chat-light", 1080, 780),
    Picture("chat-dark", 980, 700, dark=True, settings=True),
    Picture("chat-phone", 360, 720),
)


def converse(visit: Visit, server: PageServer) -> None:
    """One question and its reply, 46 tokens a second by the page's clock."""
    visit.page.locator("#input:enabled").wait_for()
    visit.ask(QUESTION)
    visit.button("Stop").wait_for()
    visit.at(140)
    server.say(REPLY[:3], 1)
    visit.figures.first.wait_for()
    visit.at(140 + 1000 * (TOKENS - 1) / 46)
    server.say(REPLY[3:], TOKENS)
    server.finish(TOKENS)
    visit.page.get_by_text("finished").wait_for()


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    server = PageServer().start()
    try:
        with launched() as browser:
            for it in PICTURES:
                with visiting(browser, width=it.width, height=it.height, dark=it.dark) as context:
                    visit = Visit(context.new_page()).open(server.url, clock=True)
                    converse(visit, server)
                    if it.settings:
                        visit.settings()
                        visit.setting("Temperature").fill("0.3")
                        visit.setting("System message").fill("Be exact, and brief.")
                    visit.page.wait_for_timeout(100)
                    visit.page.screenshot(path=folder / f"{it.name}.png")
    finally:
        server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
