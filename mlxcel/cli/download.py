"""`mlxcel download`: named models into the store, their paths on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from mlxcel.errors import UsageError
from mlxcel.resolve import download_model, stored_name
from mlxcel.store import HubName, ModelStore

if TYPE_CHECKING:
    from mlxcel.cli.context import CliContext


@click.command("download")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Fetch again what is there already.")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a model of Hugging Face.")
@click.option(
    "--export-tokenizer",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write the tokenizer and its chat template as Hugging Face tools read them, into a new or empty folder.",
)
@click.pass_obj
def command(
    context: CliContext, *, names: tuple[str, ...], force: bool, revision: str | None, export_tokenizer: Path | None
) -> None:
    """Fetch models into the store, verify them, and print their paths.

    A name is one that `mlxcel list` shows, or owner/name[@revision][:quantisation] of Hugging Face. What is there is
    verified, and fetched again only where it is damaged.
    """
    if revision is not None:
        names = tuple(_at_revision(name, revision) for name in names)
    if export_tokenizer is not None:
        _require_export(names, export_tokenizer)
    sources = context.plugins().model_sources()
    store = ModelStore(context.config.store_root)
    progress = context.progress()
    for name in names:
        path = download_model(
            name,
            sources=sources,
            store=store,
            offline=context.config.offline,
            force=force,
            progress=progress,
            say=context.say,
        )
        if export_tokenizer is not None:
            with store.use(stored_name(name)):
                _export(context, path, export_tokenizer)
        click.echo(str(path))


def _at_revision(name: str, revision: str) -> str:
    """The name with the revision in it."""
    hub = HubName.parse(name)
    if hub is None:
        raise UsageError(
            f"--revision {revision!r}: {name!r} has no revisions", hint="only owner/name of Hugging Face has them"
        )
    given = HubName.parse(f"{hub.repository}@{revision}")
    if given is None:
        raise UsageError(f"--revision {revision!r} is no branch, tag or commit", hint="it has no space, '@' or ':'")
    if f"@{hub.revision}" in name and hub.revision != given.revision:
        raise UsageError(
            f"{name!r} names the revision {hub.revision!r} and --revision {revision!r}", hint="leave one of them out"
        )
    return attrs.evolve(hub, revision=given.revision).text


def _require_export(names: tuple[str, ...], folder: Path) -> None:
    """Known before anything is fetched."""
    from mlxcel.tokenizer_export import require_new_folder

    if len(names) > 1:
        raise UsageError(
            f"--export-tokenizer takes the tokenizer of one model, {len(names)} are named", hint="name one of them"
        )
    require_new_folder(folder)


def _export(context: CliContext, path: Path, folder: Path) -> None:
    from mlxcel.load import choose_tokenizer, open_checkpoint
    from mlxcel.tokenizer_export import export_tokenizer

    manager = context.plugins()
    checkpoint = open_checkpoint(path, manager)
    try:
        written = export_tokenizer(checkpoint, choose_tokenizer(checkpoint, manager), folder)
    finally:
        checkpoint.close()
    context.say(f"tokenizer: {', '.join(map(str, written.files))}")
    for text in written.differing:
        context.say(f"warning: the exported tokenizer gives other ids than the model's own for {text!r}")
