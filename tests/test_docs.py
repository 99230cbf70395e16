"""Documentation that can be checked against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxcel.cli.commands import BUILT_IN
from mlxcel.cli.reference import filled
from mlxcel.server.app import built_in_routes
from mlxcel.server.errors import OPENAI_TYPES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "holds"), [("cli", "--ctx-size"), ("sampling", "stop_sequences"), ("server", "--max-body-size")]
)
def test_tables_are_current(name: str, holds: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    assert page.count("<!-- table:") == page.count("<!-- end -->") == 2
    assert holds in page
    assert filled(page) == page, f"docs/{name}.md is stale: make docs"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_commands_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make (?:[A-Z]+=\S+ )?([a-z-]+)\b", (ROOT / page).read_text(encoding="utf-8")))
    assert named & targets
    assert {"demo", "test"} <= targets
    for block in re.findall(r"```\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
        assert set(re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)) <= targets


def test_the_readme_names_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    named = set(re.findall(r"^mlxcel ([a-z][a-z-]*)", blocks, re.MULTILINE))
    assert named
    assert named <= {entry.name for entry in BUILT_IN}


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for entry in BUILT_IN:
        assert f"`{entry.name}" in page


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/cli.md", "docs/server.md", "docs/architecture.md"]
)
def test_links_and_files_exist(page: str) -> None:
    """Targets of links, and the modules that a page names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"\]\(([^)#:]+)(?:#[^):]*)?\)", text))
    assert targets
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []
    modules = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text))
    known = {
        path.relative_to(ROOT).as_posix()
        for part in ("mlxcel", "backends", "benchmarks")
        for path in (ROOT / part).rglob("*.py")
    }
    assert [name for name in modules if not any(f"/{path}".endswith(f"/{name}") for path in known)] == []


def test_every_route_of_the_server_is_documented() -> None:
    """And every status that it gives, with OpenAI's codes of it."""
    text = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    paths = {getattr(route, "path", "") for route in built_in_routes()}
    assert len(paths) > 20
    for path in paths:
        assert f"`{path.split('{')[0]}" in text, path
    for status in OPENAI_TYPES:
        assert re.search(rf"^\| [0-9, ]*{status}\b", text, re.MULTILINE), status
