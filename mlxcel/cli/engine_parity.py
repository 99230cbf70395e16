"""`mlxcel engine-parity`: whether every way of running a request gives the same tokens (docs/spec/clients.md 5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from mlxcel.cli.context import CliContext
from mlxcel.cli.options import (
    KindType,
    SectionCommand,
    SectionOption,
    config_option,
    conflict,
    engine_options,
    model_argument,
)
from mlxcel.cli.record_file import RecordFile
from mlxcel.cli.streams import give_up_stdout, tell
from mlxcel.cli.tool_options import SECTION, random_weights_options
from mlxcel.errors import UsageError
from mlxcel.option_values import FILE, MAX_WHOLE, NAME, Kind, real_in, whole
from mlxcel.tools.parity.options import (
    BATCH,
    CASES,
    CHUNKS,
    GROUPS,
    MAX_TOKENS,
    PROMPT_TOKENS,
    SEED,
    ParityOptions,
)

if TYPE_CHECKING:
    from mlxcel.tools.parity.early import AskedPrompt

_OWN: Final = ("loop_detection", "enable_prefix_caching", "prompt_cache_file", "served_model_name", "no_warmup")
"""Engine options that the tool decides itself, or that change no token."""


def names_of(known: tuple[str, ...]) -> Kind:
    """A list of these names, each once."""

    def read(value: Any) -> tuple[str, ...]:
        found = tuple(name.strip() for name in str(value).split(","))
        if len(set(found)) < len(found) or not set(found) <= set(known):
            raise ValueError(value)
        return found

    return Kind("LIST", f"a list of {', '.join(known)}, with commas between them", read, read)


def _two_sizes(value: Any) -> tuple[int, ...]:
    size = whole(1, 2**31 - 1)
    found = tuple(size.from_text(each.strip()) for each in str(value).split(","))
    if len(found) != 2:
        raise ValueError(value)
    return found


_CHUNKS: Final = Kind("A,B", "two numbers of tokens, such as 128,512", _two_sizes, _two_sizes)


def _option(flags: tuple[str, ...], kind: Kind, help_text: str, default: Any = None) -> SectionOption:
    return SectionOption(
        flags, type=KindType(kind), metavar=kind.metavar, default=default, help=help_text, section=SECTION
    )


def _options() -> list[click.Parameter]:
    tokens = whole(1, 2**31 - 1, "an integer from 1 to 2147483647")
    return [
        SectionOption(("-p", "--prompt"), metavar="TEXT", help="The prompt.  [a text of ours]", section="Prompt"),
        SectionOption(("-f", "--file"), metavar="FILE", help="The prompt, from a file; -: stdin.", section="Prompt"),
        SectionOption(("--token-ids",), metavar="LIST", help="The prompt as ids, 1,15,203.", section="Prompt"),
        SectionOption(
            ("--prompt-tokens",), type=KindType(whole(0, 2**31 - 1)), metavar="N", section="Prompt",
            help=f"Tokens of the text of ours.  [{PROMPT_TOKENS}]",
        ),
        SectionOption(
            ("--chat/--raw",), default=False, section="Prompt",
            help="Put -p or -f into the chat template, or take it as it is.  [raw]",
        ),
        _option(("-n", "--max-tokens"), tokens, f"Tokens of each stream.  [{MAX_TOKENS}]", MAX_TOKENS),
        _option(("--cases",), names_of(CASES), f"Requests that are run.  [{','.join(CASES)}]", CASES),
        _option(
            ("--pairs",), names_of(GROUPS),
            f"Groups of pairs: {', '.join(GROUPS)}.  [all; backend where there is a second one]",
        ),
        _option(("--chunks",), _CHUNKS, f"The two prefill chunks.  [{CHUNKS[0]},{CHUNKS[1]}]", CHUNKS),
        _option(
            ("--batch",), whole(2, 4096, "an integer from 2 to 4096"), f"Rows of the crowd.  [{BATCH}]", BATCH
        ),
        _option(("--other-backend",), NAME, "The second backend.  [reference-numpy, or the next that is available]"),
        _option(
            ("--gap-bound",), real_in(0, 1e9, "a number from 0 to 1e9"),
            "Nats between the two best tokens below which two backends may differ.  [0.001; 0.1 for 16 bits and "
            "quantised weights]",
        ),
        _option(("--seed",), whole(0, MAX_WHOLE, "an integer from 0 to 2**63 - 1"), f"Of the draws.  [{SEED}]", SEED),
        _option(("--require",), names_of(GROUPS), "Groups that must not be n/a.", ()),
        SectionOption(
            ("--expect-identical",), is_flag=True, help="End with 1 where two streams diverge.", section=SECTION
        ),
        _option(("--json", "json_file"), FILE, "Write everything to this file as JSON; -: stdout, the table then goes "
                "to stderr."),
        *random_weights_options(),
    ]  # fmt: skip


@click.command(
    "engine-parity",
    cls=SectionCommand,
    params=[
        model_argument(),
        *_options(),
        *engine_options("model", "engine", without=_OWN),
        config_option(),
        *engine_options("advanced", "scheduler", without=_OWN),
    ],
)
@click.pass_obj
def command(
    context: CliContext,
    /,
    *,
    prompt: str | None,
    file: str | None,
    token_ids: str | None,
    prompt_tokens: int | None,
    chat: bool,
    json_file: str | None,
    random_weights: str | None,
    weights_seed: int,
    pairs: tuple[str, ...] | None,
    **given: Any,
) -> int:
    """Run one request in every way there is, and compare the tokens: by generate's client and by the scheduler, dense
    and paged, with and without the prompt cache, in short and long pieces, alone and in a crowd, on two backends.

    MODEL is a folder, a .gguf file, or a name that `mlxcel list` shows. Needs --deterministic, or
    MLXCEL_SDPA_DETERMINISTIC=1.
    """
    context.scheduler = True
    options = ParityOptions(groups=pairs, **given)
    asked = _asked(prompt, file, token_ids, prompt_tokens, chat)
    from mlxcel.tools.engine_parity import engine_parity
    from mlxcel.tools.parity.report import as_json, table

    with _opened(json_file) as write:
        done = engine_parity(
            context.config,
            context.plugins(),
            context.progress(),
            options,
            asked,
            random_weights=random_weights,
            weights_seed=weights_seed,
            say=context.say,
        )
        if json_file is not None:
            write(json.dumps(as_json(done.report), ensure_ascii=False))
        for line in table(done.report, done.tokenizer):
            tell(line) if json_file == "-" else _print(line)
    return done.report.exit_code


def _print(line: str) -> None:
    """On stdout. Where its reader has left, the exit code still says what was found."""
    try:
        click.echo(line)
    except BrokenPipeError:
        give_up_stdout()


def _asked(
    prompt: str | None, file: str | None, token_ids: str | None, prompt_tokens: int | None, chat: bool
) -> AskedPrompt:
    from mlxcel.cli.prompt_input import read_prompt
    from mlxcel.tools.parity.early import AskedPrompt

    named = [flag for flag, value in (("-p", prompt), ("-f", file), ("--token-ids", token_ids)) if value is not None]
    if named and prompt_tokens is not None:
        raise conflict(named[0], "--prompt-tokens")
    if chat and (token_ids is not None or not named):
        raise UsageError("--chat needs a text to put into the template", hint="give one with -p or -f")
    length = PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    if not named:
        return AskedPrompt(length)
    read = read_prompt(prompt=prompt, file=file, raw=not chat, system=None, messages=None, token_ids=token_ids)
    messages = None if read.messages is None else tuple(read.messages)
    return AskedPrompt(length, messages, read.text, read.ids)


@contextmanager
def _opened(file: str | None) -> Iterator[Callable[[str], None]]:
    """Where JSON goes, if there is to be any: stdout, or a file."""
    if file is None or file == "-":
        yield _print
        return
    with closing(RecordFile("--json", file)) as record:
        yield record.replace
