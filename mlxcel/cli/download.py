"""`mlxcel download`: named models into the store, their paths on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlxcel.resolve import download_model
from mlxcel.store import ModelStore

if TYPE_CHECKING:
    from mlxcel.cli.context import CliContext


@click.command("download")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Fetch again what is there already.")
@click.pass_obj
def command(context: CliContext, *, names: tuple[str, ...], force: bool) -> None:
    """Fetch models into the store, verify them, and print their paths.

    What is there is verified, and fetched again only where it is damaged.
    """
    sources = context.plugins().model_sources()
    store = ModelStore(context.config.store_root)
    progress = context.progress()
    for name in names:
        path = download_model(
            name, sources=sources, store=store, offline=context.config.offline, force=force, progress=progress
        )
        click.echo(str(path))
