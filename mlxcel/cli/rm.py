"""`mlxcel rm`: delete models from the store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from mlxcel.errors import UnknownModel, UsageError
from mlxcel.resolve import near_names
from mlxcel.store import ModelStore
from mlxcel.store.record import format_bytes

if TYPE_CHECKING:
    from mlxcel.cli.context import CliContext


@click.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def command(context: CliContext, *, names: tuple[str, ...], yes: bool) -> None:
    """Delete models from the store. Only names that `mlxcel list` shows as fetched."""
    store = ModelStore(context.config.store_root)
    names = tuple(dict.fromkeys(names))
    stored = {model.name: model for model in store.list()}
    for name in names:  # all of them before the first is deleted
        if name not in stored:
            raise UnknownModel(
                f"{name!r} is not a name in the model store {store.root}", hint=near_names(name, sorted(stored))
            )
    if not yes:
        if not _asks():
            raise UsageError("rm asks before it deletes, and stdin is not a terminal", hint="-y deletes without asking")
        size = format_bytes(sum(stored[name].size for name in names))
        if not click.confirm(f"delete {', '.join(names)} ({size})?", err=True):
            click.echo("nothing is deleted", err=True)
            return
    for name in names:
        store.remove(name)


def _asks() -> bool:
    return sys.stdin.isatty()
