"""`mlxcel run`: the chat client, one row through the scheduler in this process (docs/spec/clients.md 1.7)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from mlxcel.cli.context import CliContext
from mlxcel.cli.interrupts import interrupts_to
from mlxcel.cli.one_reply import (
    Layers,
    Printing,
    log_settings,
    make_spec,
    print_end,
    refuse_early,
    refuse_idle,
    resolve_for,
    sampling_layers,
)
from mlxcel.cli.options import SectionCommand, SectionOption, config_option, engine_options, model_argument
from mlxcel.cli.prompt_input import PromptInput, argument_text, read_prompt
from mlxcel.cli.reply_options import output_options, prompt_options
from mlxcel.cli.reply_output import utf8_stdout
from mlxcel.cli.sampling_options import given_fields, sampling_options
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.serve_engine import Serving

HISTORY: Final = "run-history"


@click.command(
    "run",
    cls=SectionCommand,
    params=[
        model_argument(),
        *prompt_options(),
        *sampling_options(),
        *output_options(),
        SectionOption(("--no-history",), is_flag=True, help="Keep no file of what was typed.", section="Output"),
        *engine_options("output", "model", "engine"),
        config_option(),
        *engine_options("advanced"),
        *engine_options("scheduler", without=("max_num_seqs", "max_n", "max_logprobs")),
    ],
)
@click.pass_obj
def command(
    context: CliContext,
    /,
    *,
    prompt: str | None,
    file: str | None,
    system: str | None,
    messages: str | None,
    strict: bool,
    show_reasoning: bool,
    no_stream: bool,
    no_newline: bool,
    as_json: bool,
    no_history: bool,
    **sampling: Any,
) -> int:
    """Talk with a model at a terminal; one turn with -p, -f, --messages, or a pipe on stdin.

    MODEL is a folder, a .gguf file, or a name that `mlxcel list` shows. /help lists what the conversation understands.
    """
    given = given_fields(sampling)
    refuse_idle(context, raw=False, ids=False, add_special=given.get("add_special_tokens"))
    printing = Printing(show_reasoning, no_stream, no_newline, as_json)
    talk = prompt is None and file is None and messages is None and sys.stdin.isatty()
    asked = None
    if talk:
        _refuse_with_talk(printing)
        system = None if system is None else argument_text(system, "--system")
    else:
        asked = read_prompt(prompt=prompt, file=file, raw=False, system=system, messages=messages, token_ids=None)
    context.scheduler = context.one_row = True
    config = context.config
    if asked is not None and config.enable_prefix_caching is None:
        config = attrs.evolve(config, enable_prefix_caching=False)  # there is no second turn that could use it
    layers = sampling_layers(config, given)
    refuse_early(config, layers, strict=strict)
    utf8_stdout()
    serving = _serve(context, config)
    try:
        if asked is not None:
            return _one_turn(context, serving, asked, layers, strict=strict, printing=printing)
        history = None if no_history or config.state_root is None else config.state_root / HISTORY
        return _talk(context, serving, layers, strict=strict, printing=printing, system=system, history=history)
    finally:
        serving.close()


def _refuse_with_talk(printing: Printing) -> None:
    for flag, given in (("--json", printing.as_json), ("--no-newline", printing.no_newline)):
        if given:
            raise UsageError(
                f"{flag} is for one reply, and a conversation at the terminal has many",
                hint="ask one thing: -p TEXT, -f FILE, --messages FILE or a pipe on stdin",
            )


def _serve(context: CliContext, config: EngineConfig) -> Serving:
    from mlxcel.serve_engine import serve

    return serve(config, context.plugins(), context.progress(), max_queue_depth=1, say=context.say)


def _one_turn(
    context: CliContext, serving: Serving, asked: PromptInput, layers: Layers, *, strict: bool, printing: Printing
) -> int:
    from mlxcel.cli.scheduled_reply import ReplyBell, answer

    model = serving.model
    resolved = resolve_for(context, model, layers, strict=strict)
    spec = make_spec(asked, model, resolved, "run")
    log_settings(context.config.origins, attrs.evolve(resolved, params=spec.params), model)
    output, bell = printing.output(spec), ReplyBell()
    model.observers.add(bell)
    with interrupts_to(bell.stop, leave_at_second=True):
        listening = output if printing.streams else None
        result = answer(serving.scheduler, spec, resolved, bell, listening, context.progress())
        return print_end(context, model, result, printing, output)


def _talk(
    context: CliContext,
    serving: Serving,
    layers: Layers,
    *,
    strict: bool,
    printing: Printing,
    system: str | None,
    history: Path | None,
) -> int:
    from mlxcel.cli.dialogue import Dialogue
    from mlxcel.cli.line_editor import LineEditor
    from mlxcel.cli.repl import Repl

    dialogue = Dialogue()
    dialogue.set_system(system or "")
    editor = LineEditor(history)
    return Repl(context, serving, editor, layers, strict=strict, printing=printing, dialogue=dialogue).loop()
