"""The program's frame: finds the command, runs it, and turns what it raises into one line and an exit code."""

from __future__ import annotations

import copy
import errno
import platform
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from mlxcel.cli import commands
from mlxcel.cli.context import CliContext
from mlxcel.cli.interrupts import INTERRUPTED, two_interrupts
from mlxcel.cli.options import global_options
from mlxcel.cli.streams import give_up_stdout, open_missing, tell
from mlxcel.config import COMPLETION_VARIABLE, completion_request, plugin_limit_in_force
from mlxcel.errors import CheckpointError, MlxcelError, ServerError

OK: Final = 0
USAGE: Final = 2
RUNTIME: Final = 3

STDOUT_FAULTS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Of an error without a file name: all other files are opened by name, or told of by who writes them."""


class Program(click.Group):
    """Commands by name, imported when they are run; each takes the global options too."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*commands.NAMES, *(entry.name for entry in commands.third_party(plugin_limit_in_force()))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = commands.find(cmd_name, plugin_limit_in_force())
        return None if found is None else with_global_options(found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        found = self.get_command(ctx, args[0])
        if found is None and not ctx.resilient_parsing:
            raise commands.unknown(args[0], plugin_limit_in_force())
        return args[0], found, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in dict.fromkeys(entry.group for entry in commands.BUILT_IN):
            rows = [
                (", ".join((entry.name, *entry.aliases)), entry.help)
                for entry in commands.BUILT_IN
                if entry.group == group
            ]
            with formatter.section(group):
                formatter.write_dl(rows)
        others = commands.third_party(plugin_limit_in_force())
        if others:
            with formatter.section("From plugins"):
                formatter.write_dl([(entry.name, f"{entry.distribution} {entry.version}") for entry in others])


def with_global_options(command: click.Command) -> click.Command:
    """A copy that takes the global options as well, but for flags that are the command's own."""
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    extra = [option for option in global_options() if not own & {*option.opts, *option.secondary_opts}]
    taking = copy.copy(command)
    taking.params = [*command.params, *extra]
    return taking


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from mlxcel.version import commit, version

        click.echo(f"mlxcel {version()} (commit {commit()}, Python {platform.python_version()})")
        ctx.exit()


def program() -> Program:
    """The root command."""
    version = click.Option(
        ("--version",), is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
        help="Version, commit, and Python.",
    )  # fmt: skip
    return Program(
        "mlxcel",
        params=[*global_options(), version],
        help="Run language models: one row-invariant engine, plugins for everything else.\n\n"
        "The options below stand before or after the command.",
        subcommand_metavar="COMMAND [OPTIONS] [MODEL]",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code of docs/spec/clients.md 1.3. Nothing is raised."""
    open_missing()
    root = program()
    if (asked := completion_request()) is not None:
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "mlxcel", COMPLETION_VARIABLE, asked)
    context = CliContext()
    with two_interrupts():
        try:
            return _run(root, list(sys.argv[1:] if arguments is None else arguments), context)
        except KeyboardInterrupt:
            _tell("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            give_up_stdout()  # its reader has what it wanted
            return OK
        except Exception as error:
            return _explain(error, context)


def _run(root: Program, arguments: list[str], context: CliContext) -> int:
    try:
        with root.make_context("mlxcel", arguments, obj=context) as ctx, _logging(context):
            returned: Any = root.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    finally:
        context.drop_progress()
    return returned if type(returned) is int else OK


def _explain(error: Exception, context: CliContext) -> int:
    """Print the error; its exit code."""
    if context.verbosity >= 2:
        tell("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, MlxcelError):
        _tell(f"error: {error.message}", error.hint or _usual_hint(error))
        return error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        _tell(error.format_message())
        return USAGE
    if isinstance(error, click.ClickException):
        _tell(f"error: {_lowered(error)}", _next_step(error))
        return USAGE
    if isinstance(error, MemoryError):
        _tell(f"error: out of memory{f': {error}' if str(error) else ''}", "a smaller --ctx-size takes less")
        return RUNTIME
    if isinstance(error, OSError) and error.filename is None and error.errno in STDOUT_FAULTS:
        give_up_stdout()
        _tell(f"error: stdout cannot be written: {error.strerror}", "its disk may be full, or it was closed")
        return RUNTIME
    _tell(
        f"error: unexpected {type(error).__name__}: {error}",
        "this is a fault of mlxcel or of a plugin; -vv shows where, `mlxcel plugins` what is installed",
    )
    return RUNTIME


def _lowered(error: click.ClickException) -> str:
    """click's message in our manner: one line, no capital, no full stop."""
    text = " ".join(error.message.split()) if isinstance(error, click.NoSuchOption) else error.format_message()
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _next_step(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        return f"did you mean {' or '.join(error.possibilities)}?"
    ctx = getattr(error, "ctx", None)
    return f"`{ctx.command_path if ctx else 'mlxcel'} --help` lists what there is"


def _usual_hint(error: MlxcelError) -> str:
    """The next step where the error itself names none: every error line has its hint."""
    if error.exit_code == USAGE:
        return "`mlxcel COMMAND --help` says what each option takes"
    if isinstance(error, CheckpointError):
        return "take the files of the checkpoint again from where they came, or take another checkpoint"
    if isinstance(error, ServerError):
        return "ask again in a moment" if error.status == 503 else "the server's log may say why"
    return "-vv shows where it happened, `mlxcel doctor` whether the installation is whole"


def _tell(line: str, hint: str | None = None) -> None:
    tell(line if hint is None else f"{line}\nhint: {hint}")


@contextmanager
def _logging(context: CliContext) -> Iterator[None]:
    """Our loggers on stderr: warnings, -v infos, -vv everything, -q errors."""
    import logging

    logger = logging.getLogger("mlxcel")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    class Volume(logging.Filter):
        """Options behind the command's name change the volume after this is set up."""

        def filter(self, record: logging.LogRecord) -> bool:
            if context.quiet:
                return record.levelno >= logging.ERROR
            return record.levelno >= (logging.WARNING, logging.INFO, logging.DEBUG)[min(context.verbosity, 2)]

    handler.addFilter(Volume())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
