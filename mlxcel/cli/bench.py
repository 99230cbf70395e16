"""`mlxcel bench ...`: commands that measure."""

from __future__ import annotations

import click

from mlxcel.cli import bench_serve


@click.group("bench")
def command() -> None:
    """Measure speed."""


command.add_command(bench_serve.command)
