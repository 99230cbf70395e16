"""`mlxcel plugins`: what is installed, what it registered, and what failed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs
import click

from mlxcel.cli.commands import NAMES
from mlxcel.errors import MlxcelError

if TYPE_CHECKING:
    from mlxcel.cli.context import CliContext
    from mlxcel.plugins.registry import PluginInfo


class PluginsFailed(MlxcelError):
    """Under --strict: a plugin failed, or two have registered one name."""

    code = "plugins_failed"


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--strict", is_flag=True, help="Exit 3 when a plugin failed or a name is registered twice.")
@click.pass_obj
def command(context: CliContext, *, as_json: bool, strict: bool) -> None:
    """Installed plugins: hooks used, names registered, versions, load errors."""
    plugins = context.plugins()
    infos, commands, clashes = plugins.infos(), plugins.command_entries(), plugins.clashes(built_in_commands=NAMES)
    if as_json:
        rows = [attrs.asdict(info) for info in infos]
        third_party = [attrs.asdict(entry) for entry in commands]
        click.echo(json.dumps({"plugins": rows, "commands": third_party, "clashes": clashes}, indent=2))
    else:
        for line in lines(infos):
            click.echo(line)
        for entry in commands:
            click.echo(f"command {entry.name}: {entry.distribution} {entry.version}")
        for clash in clashes:
            click.echo(f"error: {clash}")
    failed = [f"{info.entry_point} of {info.distribution}" for info in infos if info.error]
    if strict and (failed or clashes):
        raise PluginsFailed(
            "; ".join([*(f"the plugin {name} failed" for name in failed), *clashes]),
            hint="`mlxcel plugins` without --strict shows the reasons; MLXCEL_PLUGINS leaves distributions out",
        )


def lines(infos: Iterable[PluginInfo]) -> Iterable[str]:
    """One line a plugin, below it one for each hook, and one for what failed."""
    for info in infos:
        yield f"{info.entry_point}: {info.distribution} {info.version}"
        for hook in info.hooks:
            yield f"  {hook}: {', '.join(info.names[hook]) or 'nothing'}"
        if info.error:
            yield f"  error: {info.error}"
