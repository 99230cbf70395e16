"""What the clients of one reply share: from flags and a prompt to a spec, from its result to stdout."""

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
from mlxcel.cli.prompt_input import PromptInput
from mlxcel.cli.reply_output import ReplyOutput, write
from mlxcel.cli.streams import tell
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.resolve_sampling import Resolved
    from mlxcel.core.result import RequestResult
    from mlxcel.load import LoadedModel

log = logging.getLogger("mlxcel.cli")

Layers = tuple[tuple[str, Mapping[str, Any]], ...]
"""Sampling values by who said them, weaker ones first."""


@attrs.frozen
class Printing:
    """What of a reply is printed."""

    show_reasoning: bool
    no_stream: bool
    no_newline: bool = False
    as_json: bool = False

    def output(self, spec: SequenceSpec) -> ReplyOutput:
        return ReplyOutput(self.show_reasoning and not (spec.reasoning is not None and spec.reasoning.whole))

    @property
    def streams(self) -> bool:
        return not (self.no_stream or self.as_json)


def refuse_idle(context: CliContext, *, raw: bool, ids: bool, add_special: bool | None) -> None:
    """Flags that could not act (rule 2 of docs/spec/clients.md)."""
    if add_special is not None and (ids or not raw):
        flag = "--add-special" if add_special else "--no-add-special"
        with_what = "--token-ids: they are fed as they are" if ids else "a chat template, which writes its own"
        raise UsageError(f"{flag} does nothing with {with_what}", hint="it needs `generate`, --raw and a text")
    for name in ("chat_template", "chat_template_file", "chat_template_kwargs"):
        if raw and name in context.given:
            raise UsageError(
                f"{context.given[name][1]} and {'--token-ids' if ids else '--raw'} exclude each other",
                hint="leave one of them out",
            )


def sampling_layers(config: EngineConfig, given: Mapping[str, Any]) -> Layers:
    """What flags and variables say of the sampling, by where they said it."""
    loop = config.origins["loop_detection"]
    before = () if loop == "default" else ((loop, {"loop_detection": config.loop_detection}),)
    return *before, ("flag", given)


def resolve(layers: Iterable[tuple[str, Mapping[str, Any]]], *, strict: bool) -> Resolved:
    """With the command line's defaults. A seed that nobody gave is drawn."""
    from mlxcel.core.resolve_sampling import resolve_sampling

    return resolve_sampling("cli", *layers, strict=strict, fresh_seed=lambda: secrets.randbits(63))


def refuse_early(config: EngineConfig, layers: Layers, *, strict: bool) -> None:
    """What the values themselves say, before a model is loaded."""
    resolve(layers, strict=strict and config.generation_config in ("eos", "none"))


def resolve_for(context: CliContext, model: LoadedModel, layers: Layers, *, strict: bool) -> Resolved:
    """With what the model's own file says. Values that cannot act are said."""
    resolved = resolve((("generation_config", model.defaults.sampling), *layers), strict=strict)
    for warning in resolved.warnings:
        context.say(f"warning: {warning}")
    return resolved


def make_spec(asked: PromptInput, model: LoadedModel, resolved: Resolved, request_id: str) -> SequenceSpec:
    """RequestError for what this model cannot do."""
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
    return sequence_spec(model, prompt, resolved.params, request_id=request_id, caps=Caps(max_n=1))


def log_settings(origins: Mapping[str, str], resolved: Resolved, model: LoadedModel) -> None:
    chosen = [f"{name} ({origin})" for name, origin in origins.items() if origin != "default"]
    log.info("options that were set: %s", ", ".join(chosen) or "none")
    values = [f"{name}={getattr(resolved.params, name)} ({origin})" for name, origin in resolved.origin.items()]
    log.info("sampling: %s", ", ".join(values))
    log.info("ends: %s", ", ".join(f"{token} ({', '.join(of)})" for token, of in sorted(model.ends.sources.items())))


def print_end(
    context: CliContext, model: LoadedModel, result: RequestResult, printing: Printing, output: ReplyOutput
) -> int:
    """What is left to be said when the reply has ended; the exit code. Raises the error of a row that failed."""
    if printing.as_json and result.error is None:
        from mlxcel.report import reply

        click.echo(json.dumps(reply(result, model), ensure_ascii=False))
    elif not printing.as_json:
        if printing.no_stream:
            output.reasoning(result.reasoning or "")
            output.text(result.text)
        write("" if printing.no_newline else "\n")
        if result.reasoning and not result.text and not printing.show_reasoning:
            context.say("the reply is reasoning alone: --show-reasoning prints it")
    if context.config.print_token_ids:
        tell(" ".join(["token ids:", *map(str, result.token_ids)]))
    if result.error is not None:
        raise result.error
    from mlxcel.report import statistics

    context.say(statistics(result, model))
    return INTERRUPTED if result.cause == "cancelled" else 0
