"""Which commands there are: ours in a static table, others by their entry points. Listing them imports none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs
import click

from mlxcel.core.named import load_target
from mlxcel.errors import PluginError, UsageError

if TYPE_CHECKING:
    from mlxcel.plugins.discovery import EntryPoint


@attrs.frozen
class BuiltIn:
    """A command of ours. `target` is "module:attribute"."""

    name: str
    target: str
    help: str
    group: str
    aliases: tuple[str, ...] = ()


BUILT_IN: Final = (
    BuiltIn("run", "mlxcel.cli.run:command", "Talk with a model, or ask it one thing.", "Text"),
    BuiltIn("generate", "mlxcel.cli.generate:command", "Answer one prompt.", "Text"),
    BuiltIn("serve", "mlxcel.cli.serve:command", "Serve a model over HTTP.", "Text"),
    BuiltIn(
        "list", "mlxcel.cli.list:command", "Models in the store, and names that can be fetched.", "Models", ("ls",)
    ),
    BuiltIn("download", "mlxcel.cli.download:command", "Fetch models into the store and verify them.", "Models"),
    BuiltIn("rm", "mlxcel.cli.rm:command", "Delete models from the store.", "Models"),
    BuiltIn("inspect", "mlxcel.cli.inspect:command", "What a checkpoint holds, and whether it fits.", "Models"),
    BuiltIn(
        "bench-engine", "mlxcel.cli.bench_engine:command", "Measure decode speed and time to first token.", "Measuring"
    ),
    BuiltIn("bench", "mlxcel.cli.bench:command", "Measure speed: `bench serve`, a server's.", "Measuring"),
    BuiltIn(
        "engine-parity", "mlxcel.cli.engine_parity:command", "Compare every way of running a request.", "Measuring"
    ),
    BuiltIn("plugins", "mlxcel.cli.plugins:command", "What is installed, registered, and failed.", "Installation"),
    BuiltIn("doctor", "mlxcel.cli.doctor:command", "Check this installation.", "Installation"),
    BuiltIn("completion", "mlxcel.cli.completion:command", "Print the completion script of a shell.", "Installation"),
)

NAMES: Final = frozenset(name for entry in BUILT_IN for name in (entry.name, *entry.aliases))


def built_in(name: str) -> BuiltIn | None:
    return next((entry for entry in BUILT_IN if name in (entry.name, *entry.aliases)), None)


def third_party(only: Sequence[str] | None) -> list[EntryPoint]:
    """Commands of other distributions, clashes included. `only` as MLXCEL_PLUGINS has it."""
    from mlxcel.plugins.discovery import COMMANDS_GROUP, entry_points

    return entry_points(COMMANDS_GROUP, only)


def find(name: str, only: Sequence[str] | None) -> click.Command | None:
    """The command of this name, imported now. PluginError when two have it, or when it does not import."""
    from mlxcel.plugins.discovery import command_clashes

    entry = built_in(name)
    others = [other for other in third_party(only) if other.name == name]
    if clashes := command_clashes(others, NAMES):
        raise PluginError(clashes[0], hint="uninstall one of them, or leave one out with MLXCEL_PLUGINS")
    if entry is not None:
        found: click.Command = load_target(entry.target)
        return found
    return _loaded(others[0]) if others else None


def _loaded(entry: EntryPoint) -> click.Command:
    owner = f"{entry.distribution} {entry.version}"
    try:
        command = entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"the command {entry.name!r} of {owner} cannot be imported: {type(error).__name__}: {error}",
            hint=f"update or uninstall {entry.distribution}",
        ) from error
    if not isinstance(command, click.Command):
        raise PluginError(f"the command {entry.name!r} of {owner} is {command!r}, no click command")
    return command


def unknown(name: str, only: Sequence[str] | None) -> UsageError:
    """With the command that looks most like it."""
    from difflib import get_close_matches

    known = [*NAMES, *(entry.name for entry in third_party(only))]
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean `mlxcel {near[0]}`?" if near else "`mlxcel --help` lists the commands"
    return UsageError(f"there is no command {name!r}", hint=hint)
