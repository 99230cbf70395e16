"""`mlxcel completion`: the script that makes a shell complete our commands and options."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from mlxcel.config import COMPLETION_VARIABLE


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, *, shell: str) -> None:
    """Print the completion script of a shell, to be sourced from its start file.

    bash: eval "$(mlxcel completion bash)"
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.BadParameter(f"click knows no completion for {shell}")
    script = kind(ctx.find_root().command, {}, "mlxcel", COMPLETION_VARIABLE)
    click.echo(ShellComplete.source(script))  # bash's own would start a bash to ask for its version
