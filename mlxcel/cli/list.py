"""`mlxcel list`: the models in the store, and the registered names that are not fetched yet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs
import click

from mlxcel.core.source import ModelSource
from mlxcel.store import ModelStore, StoredModel
from mlxcel.store.record import file_format, file_quantisation, format_bytes

if TYPE_CHECKING:
    from mlxcel.cli.context import CliContext


@attrs.frozen
class Row:
    """A line of the table; its fields are the keys of --json. `size` is on disk, in bytes, `download_size` over the
    network; `revision` is the commit of a model of Hugging Face; `fetched` is null for a model that is not in the
    store, `damage` for one with nothing wrong."""

    name: str
    size: int | None
    download_size: int | None
    format: str | None
    quantisation: str | None
    source: str
    license: str
    revision: str | None
    fetched: str | None
    path: str | None
    damage: str | None


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
@click.pass_obj
def command(context: CliContext, *, as_json: bool) -> None:
    """Models in the store, and registered names not fetched yet."""
    rows = model_rows(ModelStore(context.config.store_root), context.plugins().model_sources())
    if as_json:
        click.echo(json.dumps([attrs.asdict(row) for row in rows], indent=2))
    else:
        for line in table(rows):
            click.echo(line)


def model_rows(store: ModelStore, sources: Mapping[str, ModelSource]) -> list[Row]:
    """Stored models by name, then the sources that are not stored, by name."""
    stored = store.list()
    names = {model.name for model in stored}
    rows = [_stored_row(model, sources.get(model.name)) for model in stored]
    return rows + [_source_row(sources[name]) for name in sorted(sources) if name not in names]


def table(rows: Iterable[Row]) -> list[str]:
    """The rows as text in columns."""
    cells = [("NAME", "SIZE", "FORMAT", "QUANTISATION", "LICENCE", "SOURCE", "FETCHED")]
    for row in rows:
        size = row.size if row.size is not None else row.download_size
        fetched = "damaged" if row.damage else row.fetched or "not fetched"
        shown = "-" if size is None else format_bytes(size)
        cells.append((row.name, shown, row.format or "-", row.quantisation or "-", row.license, row.source, fetched))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _stored_row(model: StoredModel, source: ModelSource | None) -> Row:
    return Row(
        name=model.name,
        size=model.size,
        download_size=source.bytes if source else None,
        format=model.format,
        quantisation=model.quantisation,
        source=model.source,
        license=model.license,
        revision=model.revision,
        fetched=model.fetched,
        path=str(model.path),
        damage=model.damage(),
    )


def _source_row(source: ModelSource) -> Row:
    names = [file.name for file in source.files]
    return Row(
        name=source.name,
        size=None,
        download_size=source.bytes,
        format=file_format(names),
        quantisation=file_quantisation(names),
        source=source.fetch,
        license=source.license,
        revision=source.revision,
        fetched=None,
        path=None,
        damage=None,
    )
