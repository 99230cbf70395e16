"""`mlxcel bench-engine`: how fast an engine decodes (docs/spec/clients.md 6)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Final

import click

from mlxcel.cli.context import CliContext
from mlxcel.cli.options import KindType, SectionCommand, SectionOption, config_option, engine_options, model_argument
from mlxcel.cli.record_file import RecordFile
from mlxcel.cli.reply_output import utf8_stdout
from mlxcel.cli.streams import give_up_stdout
from mlxcel.cli.tool_options import SECTION, random_weights_options
from mlxcel.errors import UsageError
from mlxcel.option_values import FILE, TEXT, Kind, one_of, whole
from mlxcel.options import BY_NAME
from mlxcel.tools.bench.cells import Path

PATHS: Final[Mapping[str, tuple[Path, ...]]] = {
    "direct": ("direct",),
    "cli": ("direct",),
    "scheduler": ("scheduler",),
    "server": ("scheduler",),
    "both": ("direct", "scheduler"),
}
CHUNK: Final = "prefill_chunk"
IDLE: Final = (
    *("chat_template", "chat_template_file", "chat_template_kwargs", "generation_config", "loop_detection"),
    *("no_warmup", "max_n", "max_logprobs", "enable_prefix_caching"),
    *(name for name in BY_NAME if name.startswith("prompt_cache")),
)
"""Options that could not act: prompts are raw, replies go to their last token, and no prompt is kept."""


def _sizes(most: int) -> Kind:
    def read(value: Any) -> tuple[int, ...]:
        one = whole(1, most)
        return tuple(dict.fromkeys(one.from_text(part.strip()) for part in str(value).split(",")))

    return Kind("LIST", f"integers from 1 to {most} separated by commas", read, read)


MOST_ROWS: Final = 65536
"""As --parallel."""
_AT_LEAST: Final = {least: whole(least, 2**31 - 1, f"an integer from {least} to {2**31 - 1}") for least in (1, 2)}


def _option(flags: tuple[str, ...], kind: Kind, default: Any, words: str, **more: Any) -> SectionOption:
    shown = f"{words}  [{default}]" if default is not None else words
    return SectionOption(
        flags, type=KindType(kind), metavar=kind.metavar, default=default, help=shown, section=SECTION, **more
    )


@click.command(
    "bench-engine",
    cls=SectionCommand,
    params=[
        model_argument(),
        _option(("--path",), one_of(*PATHS), "both", "The generate client (cli), the scheduler (server), or both."),
        _option(("--prompt-tokens",), _sizes(2**31 - 1), "256,8192", "Lengths of prompts, exact."),
        _option(("-n", "--max-tokens"), _AT_LEAST[2], "128", "Tokens of each reply."),
        _option(("--batch",), _sizes(MOST_ROWS), "1", "Rows at once; above 1 on the scheduler's path."),
        _option(("--repeats",), _AT_LEAST[1], "3", "Measured runs of each cell."),
        _option(("--warmup-tokens",), _AT_LEAST[2], "16", "Tokens of the unmeasured run of each cell."),
        _option(("--sampling",), one_of("greedy", "seeded"), "greedy", "How tokens are drawn."),
        *random_weights_options(),
        _option(("--label",), TEXT, None, "A word for the header."),
        _option(("--out",), FILE, None, "Append the records to this file too."),
        _option(("--compare",), FILE, None, "Earlier records: exit 1 where a figure loses more than it may."),
        SectionOption(
            ("--no-copy-bandwidth",), is_flag=True, help="Do not measure how fast memory is copied.", section=SECTION
        ),
        *engine_options("model", "engine", without=IDLE),
        config_option(),
        *engine_options("advanced", "scheduler", without=IDLE),
    ],
)  # fmt: skip
@click.pass_obj
def command(
    context: CliContext,
    /,
    *,
    path: str,
    prompt_tokens: tuple[int, ...],
    batch: tuple[int, ...],
    out: str | None,
    no_copy_bandwidth: bool,
    **asked: Any,
) -> None:
    """Measure how fast an engine decodes, and how soon its first token comes: JSON lines on stdout, a table on stderr.

    MODEL is a folder, a .gguf file, or a name that `mlxcel list` shows. A program is compiled when its cell is warmed
    up, and kept below MLXCEL_CACHE_DIR for the next run.
    """
    context.scheduler = True
    config = context.config
    _require_one_chunk(context)
    from mlxcel.config import variables_in_force
    from mlxcel.tools.bench.asked import Asked
    from mlxcel.tools.bench_engine import bench_engine

    measured = Asked(
        paths=PATHS[path],
        prompt_tokens=prompt_tokens,
        batches=batch,
        copies=not no_copy_bandwidth,
        argv=tuple(sys.argv[1:]),
        env=variables_in_force(),
        **asked,
    )
    utf8_stdout()
    with ExitStack() as stack:
        kept = None if out is None else stack.enter_context(closing(RecordFile("--out", out)))

        def emit(record: dict[str, Any]) -> None:
            line = json.dumps(record, ensure_ascii=False, allow_nan=False)
            if kept is not None:
                kept.append(line)
            try:
                click.echo(line)
            except BrokenPipeError:
                if kept is None and measured.compare is None:
                    raise
                give_up_stdout()  # the file and the exit code are still wanted

        watched = context.verbosity > 0 or (sys.stderr.isatty() and not context.quiet)
        bench_engine(
            measured, config, context.plugins(), context.progress(), emit=emit, say=context.say,
            follow=context.say if watched else lambda line: None,
        )  # fmt: skip


def _require_one_chunk(context: CliContext) -> None:
    """The chunk reaches both paths, whoever reads variables: one that says something else is a mistake."""
    from mlxcel.config import EngineConfig

    said = EngineConfig.resolve({}, config_file=context.config_file)
    here = context.given[CHUNK][0] if CHUNK in context.given else BY_NAME[CHUNK].default
    if said.origins[CHUNK] == "environment" and said.prefill_chunk != here:
        raise UsageError(
            f"{BY_NAME[CHUNK].env} is {said.prefill_chunk}, and --prefill-chunk {here}",
            hint=f"unset the variable, or say --prefill-chunk {said.prefill_chunk}",
        )
