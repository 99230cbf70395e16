"""`mlxcel bench serve`: a load on any OpenAI endpoint (docs/spec/clients.md 8)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mlxcel.cli.bench_serve_options import load_flags
from mlxcel.cli.context import CliContext
from mlxcel.cli.options import SectionCommand, SectionOption, global_options
from mlxcel.errors import ServerError, UsageError

if TYPE_CHECKING:
    from mlxcel.tools.load.options import LoadOptions
    from mlxcel.tools.load.result import Result

SHOWN: Final = 10
"""Messages of failed requests."""

ENGINES: Final = ("backend", "device", "deterministic")
"""Options that every command takes and that only an engine can honour."""


@click.command(
    "serve",
    cls=SectionCommand,
    params=[
        click.Argument(("bounds",), nargs=-1, metavar=""),
        *load_flags(),
        SectionOption(
            ("--save-result",), type=click.Path(path_type=Path), metavar="FILE",
            help="Write the result as JSON; nothing is written over.  [none]", section="Output",
        ),
        SectionOption(("--save-detailed",), is_flag=True, help="With numbers of each request.", section="Output"),
        SectionOption(("--json", "as_json"), is_flag=True, help="One JSON object on stdout.", section="Output"),
        SectionOption(
            ("--fail-on-error",), is_flag=True, help="End with 3 if any request fails.", section="Output",
        ),
        *global_options(),
    ],
)  # fmt: skip
@click.pass_obj
def command(
    context: CliContext,
    /,
    *,
    bounds: tuple[str, ...],
    save_result: Path | None,
    save_detailed: bool,
    as_json: bool,
    fail_on_error: bool,
    **given: Any,
) -> None:
    """Put a load on any OpenAI endpoint, and measure its replies.

    The numbers have the names that `vllm bench serve` has for them.
    """
    from mlxcel.cli.bench_serve_load import load_options

    options = load_options(given, bounds)
    _require_no_engine(context)
    _require_reachable(context, options)
    if save_detailed and save_result is None and not as_json:
        raise UsageError("--save-detailed has nothing to be written to", hint="add --save-result FILE or --json")
    if save_result is not None:
        _require_new(save_result)
    from mlxcel.tools.bench_serve import bench_serve
    from mlxcel.tools.load.report import table

    found = bench_serve(options, context.progress(), context.say)
    fields = {**found.fields, **(found.detail if save_detailed else {})}
    text = json.dumps(fields, indent=1)
    if save_result is not None:
        _save(save_result, text)
    if as_json:
        click.echo(text)
    else:
        for line in table(found.fields, options.percentile_metrics, options.percentiles):
            click.echo(line)
    _tell(context, found, fail_on_error)


def _tell(context: CliContext, found: Result, fail_on_error: bool) -> None:
    """What is wrong. ServerError where every request failed, or with `fail_on_error` one."""
    for message in found.failures[:SHOWN]:
        context.say(f"failed: {message}")
    if len(found.failures) > SHOWN:
        context.say(f"failed: {len(found.failures) - SHOWN} more")
    for warning in found.fields["warnings"]:
        context.say(f"warning: {warning}")
    asked, failed = found.fields["num_prompts"], found.fields["failed"]
    if failed == asked or (failed and fail_on_error):
        raise ServerError(
            f"{failed} of {asked} requests failed; the first: {found.failures[0]}",
            hint="the server's log may say why; --timeout and --max-concurrency ask less of it",
        )


def _require_no_engine(context: CliContext) -> None:
    for name in ENGINES:
        if name in context.given:
            words = context.given[name][1]
            raise UsageError(
                f"{words} has no effect here: the server has its own",
                hint="the kind of endpoint is --endpoint-type openai or openai-chat",
            )


def _require_reachable(context: CliContext, options: LoadOptions) -> None:
    """With --offline, a server of this machine."""
    if context.config.offline and options.address.host not in ("127.0.0.1", "::1", "localhost"):
        raise UsageError(
            f"{options.address.url} is another machine, and --offline is given", hint="leave --offline out"
        )


def _require_new(file: Path) -> None:
    """Known before anything is sent."""
    if file.exists():
        raise UsageError(f"--save-result: {file} is there already", hint="name a new file")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--save-result: there is no folder {file.absolute().parent}", hint="make it first")


def _save(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text + "\n")
    except OSError as error:
        raise UsageError(
            f"--save-result: {file} cannot be written: {error.strerror or error}", hint="name another file"
        ) from error
