"""Programs of others that are no part of the development environment: found on the path, or the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

LIMIT = 300.0
"""Seconds after which a program hangs."""


def program(name: str, source: str) -> str:
    """Where the program is; `source` says where one gets it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the path; {source}")
    return found


def run(words: Sequence[object], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it in a folder that is its home too: nobody's configuration is read, nor is anything left in it. What
    `environ` adds may name where packages come from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LLM_", "MLXCEL_"))}
    return subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**kept, "HOME": str(folder), "NO_COLOR": "1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
