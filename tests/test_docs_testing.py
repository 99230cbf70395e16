"""docs/testing.md says what is so: its code runs, its plugin drives the program."""

import re
import tomllib
from pathlib import Path

import pytest
from cli_runs import Cli

from mlxcel.plugins.discovery import GROUP
from mlxcel.testing.scripted import ScriptedBackend

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
PLUGIN = "# scripted_plugin.py\n"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_python_block_runs():
    names = {"__name__": "page"}
    ran = 0
    for number, block in enumerate(blocks("python")):
        if not block.startswith(PLUGIN):
            exec(compile(block, f"docs/testing.md, Python block {number + 1}", "exec"), names)
            ran += 1
    assert ran == 5
    assert names["other"].text == "World"


def test_its_plugin_scripts_the_program(third_party, monkeypatch, capfdbinary, tmp_path):
    """The command at the end of the page, with the plugin installed as a distribution."""
    (plugin,) = [block for block in blocks("python") if block.startswith(PLUGIN)]
    (project,) = map(tomllib.loads, blocks("toml"))
    (name,) = project["project"]["entry-points"][GROUP]
    third_party.install("my-tests", plugin, entry_point=name)
    (command,) = blocks("sh")
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    ran = Cli(monkeypatch, capfdbinary)(*command.split()[1:])
    assert ran.code == 0
    assert "token ids: 72 73 74" in ran.err
    assert "script" in ran.err


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_a_row_without_a_script_is_not_opened():
    with pytest.raises(KeyError, match="no script for request 'x'"):
        ScriptedBackend({"y": [1]}, vocab=2).open(0, type("Spec", (), {"request_id": "x", "prompt_ids": ()})())
