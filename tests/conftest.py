"""Fixtures that more than one test file needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_doubles import Installer


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file; `make test` fetches it into the store and names it in MLXCEL_TEST_MODEL."""
    named = os.environ.get("MLXCEL_TEST_MODEL")
    if not named:
        pytest.skip("MLXCEL_TEST_MODEL does not name the default model's GGUF file; `make test` sets it")
    path = Path(named)
    if not path.is_file():
        pytest.fail(f"MLXCEL_TEST_MODEL names {path}, which is no file")
    return path


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """An empty place for distributions; what was imported from it is forgotten after the test."""
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Installer(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
