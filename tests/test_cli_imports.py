"""`--help` imports nothing heavy (docs/spec/clients.md 1.1, test 1 of 1.10)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcel.cli.commands import BUILT_IN

HEAVY = ("jax", "numpy", "rich", "msgspec", "starlette", "hypercorn")
PLUGINS = ("mlxcel.plugins.builtin", "mlxcel_jax_cuda", "mlxcel_reference_numpy", "broken_command", "broken_plugin")

LOOK = """
import json, sys
sys.path.insert(0, {folder!r})
from contextlib import redirect_stdout
from io import StringIO
said = StringIO()
with redirect_stdout(said):
    {statement}
print(json.dumps([said.getvalue(), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third party's command and plugin, whose modules raise when they are imported."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlxcel.commands]\nbreak = broken_command:c\n[mlxcel]\nb = broken_plugin\n")
    for name in ("broken_command", "broken_plugin"):
        (folder / f"{name}.py").write_text("raise RuntimeError('imported')\n")
    return folder


def look(folder: Path, statement: str) -> tuple[str, list[str]]:
    """What the statement prints, and the modules imported then, in a process of its own."""
    script = LOOK.format(folder=str(folder), statement=statement)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    said, modules = json.loads(done.stdout.splitlines()[-1])
    return said, modules


def assert_light(modules: list[str]) -> None:
    found = [name for name in modules if name in PLUGINS or name.split(".")[0] in HEAVY]
    assert found == []


def test_help_lists_a_third_partys_command_without_importing_it(distribution: Path) -> None:
    said, modules = look(distribution, "from mlxcel.cli.main import main; main(['--help'])")
    assert "generate" in said
    assert "break" in said
    assert "broken 1.0" in said
    assert_light(modules)


def test_no_commands_help_imports_anything_heavy(distribution: Path) -> None:
    names = [entry.name for entry in BUILT_IN]
    said, modules = look(distribution, f"from mlxcel.cli.main import main; [main([n, '--help']) for n in {names!r}]")
    for name in names:
        assert f"mlxcel {name}" in said
    assert_light(modules)


def test_importing_mlxcel_imports_nothing_heavy(distribution: Path) -> None:
    _, modules = look(distribution, "import mlxcel")
    assert_light(modules)
    said, _ = look(distribution, "import mlxcel; print(all(getattr(mlxcel, n) for n in mlxcel.__all__))")
    assert said == "True\n"
