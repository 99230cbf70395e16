"""`mlxcel generate`: the direct client, one sequence through the engine (docs/spec/clients.md 1.5)."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import click

from mlxcel.cli.context import CliContext
from mlxcel.cli.interrupts import INTERRUPTED
from mlxcel.cli.options import (
    SectionCommand,
    SectionOption,
    config_option,
    engine_options,
    model_argument,
)
from mlxcel.cli.prompt_input import PromptInput, read_prompt
from mlxcel.cli.reply_output import ReplyOutput, utf8_stdout, write
from mlxcel.cli.sampling_options import given_fields, sampling_options
from mlxcel.cli.streams import tell
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.resolve_sampling import Resolved
    from mlxcel.core.result import RequestResult
    from mlxcel.load import LoadedModel

log = logging.getLogger("mlxcel.cli")


@click.command(
    "generate",
    cls=SectionCommand,
    params=[
        model_argument(),
        SectionOption(("-p", "--prompt"), metavar="TEXT", help="The prompt.", section="Prompt"),
        SectionOption(("-f", "--file"), metavar="FILE", help="The prompt, from a file; -: stdin.", section="Prompt"),
        SectionOption(("--system",), metavar="TEXT", help="A system message before it.", section="Prompt"),
        SectionOption(("--messages",), metavar="FILE", help="A conversation, as JSON; -: stdin.", section="Prompt"),
        SectionOption(
            ("--raw", "--no-chat-template"), is_flag=True, help="No chat template: the text as it is.", section="Prompt"
        ),
        SectionOption(("--token-ids",), metavar="LIST", help="The prompt as ids, 1,15,203.", section="Prompt"),
        *sampling_options(),
        SectionOption(("--show-reasoning",), is_flag=True, help="Print the model's reasoning too.", section="Output"),
        SectionOption(("--no-stream",), is_flag=True, help="Print the reply at its end.", section="Output"),
        SectionOption(("--no-newline",), is_flag=True, help="No newline behind the reply.", section="Output"),
        SectionOption(("--json", "as_json"), is_flag=True, help="One JSON object instead.", section="Output"),
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
    _refuse_idle(context, raw=raw or token_ids is not None, ids=token_ids is not None, add_special=add_special)
    asked = read_prompt(prompt=prompt, file=file, raw=raw, system=system, messages=messages, token_ids=token_ids)
    config = context.config
    layers = _layers(config, given)
    from mlxcel.load import load_model

    _resolve(layers, strict=strict and config.generation_config in ("eos", "none"))  # refused before a model is loaded
    utf8_stdout()
    with load_model(config, context.plugins(), context.progress(), say=context.say) as model:
        resolved = _resolve((("generation_config", model.defaults.sampling), *layers), strict=strict)
        for warning in resolved.warnings:
            context.say(f"warning: {warning}")
        spec = _spec(asked, model, resolved)
        _log_settings(config.origins, attrs.evolve(resolved, params=spec.params), model)
        output = ReplyOutput(show_reasoning and not (spec.reasoning is not None and spec.reasoning.whole))
        result = _run(context, model, spec, resolved, None if no_stream or as_json else output)
        if as_json and result.error is None:
            from mlxcel.report import reply

            click.echo(json.dumps(reply(result, model), ensure_ascii=False))
        elif not as_json:
            if no_stream:
                output.reasoning(result.reasoning or "")
                output.text(result.text)
            write("" if no_newline else "\n")
            if result.reasoning and not result.text and not show_reasoning:
                context.say("the reply is reasoning alone: --show-reasoning prints it")
        if config.print_token_ids:
            tell(" ".join(["token ids:", *map(str, result.token_ids)]))
        if result.error is not None:
            raise result.error
        from mlxcel.report import statistics

        context.say(statistics(result, model))
        return INTERRUPTED if result.cause == "cancelled" else 0


def _refuse_idle(context: CliContext, *, raw: bool, ids: bool, add_special: bool | None) -> None:
    """Flags that could not act (rule 2 of docs/spec/clients.md)."""
    if add_special is not None and (ids or not raw):
        flag = "--add-special" if add_special else "--no-add-special"
        with_what = "--token-ids: they are fed as they are" if ids else "a chat template, which writes its own"
        raise UsageError(f"{flag} does nothing with {with_what}", hint="it needs --raw and a text")
    for name in ("chat_template", "chat_template_file", "chat_template_kwargs"):
        if raw and name in context.given:
            raise UsageError(
                f"{context.given[name][1]} and {'--token-ids' if ids else '--raw'} exclude each other",
                hint="leave one of them out",
            )


def _layers(config: EngineConfig, given: Mapping[str, Any]) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """What flags and variables say of the sampling, by where they said it."""
    loop = config.origins["loop_detection"]
    before = () if loop == "default" else ((loop, {"loop_detection": config.loop_detection}),)
    return *before, ("flag", given)


def _resolve(layers: Iterable[tuple[str, Mapping[str, Any]]], *, strict: bool) -> Resolved:
    from mlxcel.core.resolve_sampling import resolve_sampling

    return resolve_sampling("cli", *layers, strict=strict, fresh_seed=lambda: secrets.randbits(63))


def _spec(asked: PromptInput, model: LoadedModel, resolved: Resolved) -> SequenceSpec:
    from mlxcel.core.bind_params import Caps
    from mlxcel.prepare import Prompt, chat_prompt, raw_prompt, sequence_spec
    from mlxcel.text.prompt import check_ids

    text = asked.text
    if text is None and model.template is None and asked.raw_text is not None:
        log.info("the model has no chat template: the prompt is taken as it is")
        text = asked.raw_text
    if asked.ids is not None:
        prompt = Prompt(check_ids(asked.ids, model.facts.vocab, field="--token-ids"))
    elif text is not None:
        prompt = raw_prompt(model, text, resolved.params)
    else:
        prompt = chat_prompt(model, asked.messages or [], kwargs=None, now=time.time())
    return sequence_spec(model, prompt, resolved.params, request_id="generate", caps=Caps(max_n=1))


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
        **listeners,
    )


def _log_settings(origins: Mapping[str, str], resolved: Resolved, model: LoadedModel) -> None:
    chosen = [f"{name} ({origin})" for name, origin in origins.items() if origin != "default"]
    log.info("options that were set: %s", ", ".join(chosen) or "none")
    values = [f"{name}={getattr(resolved.params, name)} ({origin})" for name, origin in resolved.origin.items()]
    log.info("sampling: %s", ", ".join(values))
    log.info("ends: %s", ", ".join(f"{token} ({', '.join(of)})" for token, of in sorted(model.ends.sources.items())))
