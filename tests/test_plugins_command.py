"""`mlxcel plugins`, and commands of third parties (docs/spec/clients.md 1.1, 1.8)."""

from __future__ import annotations

import json

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from plugin_doubles import Installer, load, samplers

import mlxcel.cli.plugins
from mlxcel.errors import MlxcelError
from mlxcel.plugins.discovery import COMMANDS_GROUP, EntryPoint, command_clashes, entry_points
from mlxcel.plugins.manager import PluginManager


def test_commands_are_listed_and_not_imported(third_party: Installer) -> None:
    third_party.install("cli", commands={"dance": "raises_when_imported:dance"})
    (third_party.folder / "raises_when_imported.py").write_text("raise RuntimeError('imported')")
    [found] = entry_points(COMMANDS_GROUP, None)
    assert found == EntryPoint("dance", "raises_when_imported:dance", "cli", "1.0")
    with pytest.raises(RuntimeError, match="imported"):
        found.load()
    assert entry_points(COMMANDS_GROUP, ()) == []
    assert entry_points(COMMANDS_GROUP, ("CLI",)) == [found]


def test_a_command_whose_name_is_taken_is_a_clash(third_party: Installer) -> None:
    third_party.install("cli", commands={"dance": "a:b", "list": "a:c"})
    third_party.install("other", commands={"dance": "c:d", "sing": "c:e"})
    found = entry_points(COMMANDS_GROUP, None)
    expected = [
        "the command 'list' of cli 1.0 has the name of the built-in command of mlxcel",
        "the command 'dance' of other 1.0 has the name of the command of cli 1.0",
    ]
    assert command_clashes(found, ("list", "rm")) == expected
    assert [line for line in run().stdout.splitlines() if line.startswith("error: ")] == [
        f"error: {line}" for line in expected
    ]


# --- mlxcel plugins --------------------------------------------------------------------------------------------------


@attrs.frozen
class Context:
    """What the program hands to the command."""

    manager: PluginManager

    def plugins(self) -> PluginManager:
        return self.manager


def run(*arguments: str, only: tuple[str, ...] | None = None) -> Result:
    command: click.Command = mlxcel.cli.plugins.command
    return CliRunner().invoke(command, arguments, obj=Context(load(only)), catch_exceptions=True)


def test_command_lists_hooks_names_and_versions(third_party: Installer) -> None:
    third_party.install("mine", samplers("return [Named('dice', '', 'a:B')]"), commands={"dance": "a:b"})
    result = run()
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-5:] == [
        "  mlxcel_backends: reference-numpy",
        "mine: mine 1.0",
        "  mlxcel_kv_stores: drawer",
        "  mlxcel_samplers: dice",
        "command dance: mine 1.0",
    ]
    assert result.stderr == ""


def test_command_json(third_party: Installer) -> None:
    third_party.install("mine", samplers("raise ValueError('boom')"), commands={"dance": "a:b"})
    shown = json.loads(run("--json").stdout)
    assert list(shown) == ["plugins", "commands", "clashes"]
    assert shown["plugins"][-1] == {
        "distribution": "mine",
        "version": "1.0",
        "entry_point": "mine",
        "hooks": ["mlxcel_kv_stores", "mlxcel_samplers"],
        "names": {"mlxcel_kv_stores": ["drawer"], "mlxcel_samplers": []},
        "error": "mlxcel_samplers: ValueError: boom",
    }
    assert shown["commands"] == [{"name": "dance", "target": "a:b", "distribution": "mine", "version": "1.0"}]
    assert [entry["entry_point"] for entry in json.loads(run("--json", only=()).stdout)["plugins"]] == [
        "jax-cuda",
        "mlxcel-builtin",
        "reference-numpy",
    ]


def test_command_ends_well_unless_strict(third_party: Installer) -> None:
    """clients 1.8: exit 0 even when one failed; --strict gives 3."""
    assert run("--strict", only=()).exit_code == 0
    third_party.install("broken", "raise RuntimeError('broken inside')")
    third_party.install("thief", samplers("return [Named('chain', '', 'a:B')]"))
    lenient = run()
    assert lenient.exit_code == 0
    assert "  error: RuntimeError: broken inside" in lenient.stdout
    assert "error: the sampler 'chain' is registered twice" in lenient.stdout
    strict = run("--strict")
    assert isinstance(strict.exception, MlxcelError)
    assert strict.exception.exit_code == 3
    assert "broken of broken failed" in strict.exception.message
    assert "'chain' is registered twice" in strict.exception.message
    assert strict.stdout == lenient.stdout
