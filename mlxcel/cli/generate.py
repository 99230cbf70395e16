"""`mlxcel generate`: the direct client, one sequence through the engine (docs/spec/clients.md 1.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import click

from mlxcel.cli.context import CliContext
from mlxcel.cli.one_reply import (
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
from mlxcel.cli.prompt_input import read_prompt
from mlxcel.cli.reply_options import output_options, prompt_options
from mlxcel.cli.reply_output import ReplyOutput, utf8_stdout
from mlxcel.cli.sampling_options import given_fields, sampling_options

if TYPE_CHECKING:
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.resolve_sampling import Resolved
    from mlxcel.core.result import RequestResult
    from mlxcel.load import LoadedModel


@click.command(
    "generate",
    cls=SectionCommand,
    params=[
        model_argument(),
        *prompt_options(),
        SectionOption(
            ("--raw", "--no-chat-template"), is_flag=True, help="No chat template: the text as it is.", section="Prompt"
        ),
        SectionOption(("--token-ids",), metavar="LIST", help="The prompt as ids, 1,15,203.", section="Prompt"),
        *sampling_options(),
        *output_options(),
        *engine_options("output", "model", "engine"),
        config_option(),
        *engine_options("advanced"),
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
    raw: bool,
    token_ids: str | None,
    strict: bool,
    show_reasoning: bool,
    no_stream: bool,
    no_newline: bool,
    as_json: bool,
    **sampling: Any,
) -> int:
    """Answer one prompt: from -p, -f, or stdin. The reply goes to stdout, everything else to stderr.

    MODEL is a folder, a .gguf file, or a name that `mlxcel list` shows.
    """
    given = given_fields(sampling)
    add_special = given.get("add_special_tokens")
    refuse_idle(context, raw=raw or token_ids is not None, ids=token_ids is not None, add_special=add_special)
    asked = read_prompt(prompt=prompt, file=file, raw=raw, system=system, messages=messages, token_ids=token_ids)
    printing = Printing(show_reasoning, no_stream, no_newline, as_json)
    config = context.config
    layers = sampling_layers(config, given)
    from mlxcel.load import load_model

    refuse_early(config, layers, strict=strict)
    utf8_stdout()
    with load_model(config, context.plugins(), context.progress(), say=context.say) as model:
        resolved = resolve_for(context, model, layers, strict=strict)
        spec = make_spec(asked, model, resolved, "generate")
        log_settings(config.origins, attrs.evolve(resolved, params=spec.params), model)
        output = printing.output(spec)
        result = _run(context, model, spec, resolved, output if printing.streams else None)
        return print_end(context, model, result, printing, output)


def _run(
    context: CliContext, model: LoadedModel, spec: SequenceSpec, resolved: Resolved, output: ReplyOutput | None
) -> RequestResult:
    from mlxcel.direct import generate

    listeners: dict[str, Any] = {} if output is None else {"on_text": output.text, "on_reasoning": output.reasoning}
    return generate(
        model.engine,
        spec,
        planner=model.planner,
        origin=resolved.origin,
        warnings=resolved.warnings,
        progress=context.progress(),
        observers=model.observers,
        run_ahead=not context.config.force_sync,
        **listeners,
    )
