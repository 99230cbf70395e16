"""Fixtures that more than one test file needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
