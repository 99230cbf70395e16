"""From a prompt and resolved parameters to the spec of a sequence: the last step of every client before the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from mlxcel.core.bind_params import Caps, bind_params
from mlxcel.core.prompt_ids import check_prompt, truncate_prompt
from mlxcel.core.request import SequenceSpec
from mlxcel.text.prompt import encode_chat, encode_raw
from mlxcel.text.reasoning import reasoning_split

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams
    from mlxcel.load import LoadedModel


@attrs.frozen
class Prompt:
    """A prompt's ids, and where they are from: `text` of a raw prompt and of a rendered chat, None for given ids;
    `messages` of a chat alone. `added` says whether the tokenizer was asked for its special tokens."""

    ids: tuple[int, ...]
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    added: bool = False


def raw_prompt(model: LoadedModel, text: str, params: SamplingParams) -> Prompt:
    """A text as it is, with the tokenizer's special tokens unless `add_special_tokens` is false. EmptyPrompt."""
    added = params.add_special_tokens is not False
    return Prompt(encode_raw(model.tokenizer, text, added).ids, text, added=added)


def chat_prompt(
    model: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    kwargs: Mapping[str, Any] | None,
    now: float,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Prompt:
    """Messages in the model's template. Raises as `encode_chat` does."""
    made = encode_chat(
        model.tokenizer,
        model.template,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        kwargs=kwargs,
        now=now,
    )
    return Prompt(made.ids, made.text, messages)


def sequence_spec(
    model: LoadedModel, prompt: Prompt, params: SamplingParams, *, request_id: str, caps: Caps
) -> SequenceSpec:
    """The spec, complete; its parameters are those that are reported. Its prompt is whole: the client that runs it cuts
    it where `truncate_prompt_tokens` asks for that.

    RequestError for what this model, prompt or operator does not allow.
    """
    template = model.template.source if model.template is not None else None
    split = reasoning_split(params.reasoning_format, template=template, prompt=prompt.text, messages=prompt.messages)
    spec = SequenceSpec(request_id, np.asarray(prompt.ids, np.int32), params, model.ends.ids, reasoning=split)
    vocab, context = model.facts.vocab, model.facts.context
    fed = truncate_prompt(spec, context)[0].prompt_ids
    check_prompt(fed, vocab=vocab, context=context)
    bound = bind_params(
        params.clone(add_special_tokens=prompt.added),
        vocab=vocab,
        tokenizer=model.tokenizer,
        eos_ids=model.ends.ids,
        prompt_length=len(fed),
        context=context,
        caps=caps,
    )
    return attrs.evolve(spec, params=bound)
