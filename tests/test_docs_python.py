"""docs/python.md and the README's example of Python say what is so: their code runs."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from script_server import running
from tiny_checkpoint import write_tiny_llama

from mlxcel.local_client import KEYWORDS

SERVER: Final = "http://127.0.0.1:8080"

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    block
    for text in (PAGE, README)
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if "LLM" in block
]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a tiny model in the default one's place, and with a server of it where the page has one."""
    model, block = write_tiny_llama(tmp_path / "tiny"), BLOCKS[number]
    monkeypatch.setenv("MLXCEL_MODEL", str(model))
    monkeypatch.setenv("MLXCEL_BACKEND", "reference-numpy")
    with ExitStack() as held:
        if SERVER in block:
            server = held.enter_context(running(model, backend="reference-numpy"))
            block = block.replace(SERVER, server.url)
        exec(compile(block, f"Python block {number + 1}", "exec"), {"__name__": "page"})
    assert capsys.readouterr().err == ""


def test_there_are_blocks_and_their_keywords_exist() -> None:
    assert len(BLOCKS) == 6
    named = re.search(r'`LLM\("tiny", (.*?)\)`', PAGE)
    assert named is not None
    assert {each.split("=")[0].strip() for each in named[1].split(",")} <= KEYWORDS


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
