"""From what a client was given to the ids of a prompt: messages, a text, or ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.errors import EmptyPrompt, RequestError, TemplateError, shown
from mlxcel.text.messages import refuse_half_characters

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer
    from mlxcel.text.chat_template import ChatTemplate


@attrs.frozen
class PromptIds:
    """A prompt as text and as the ids of that text, at least one."""

    text: str
    ids: tuple[int, ...]


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    now: float,
) -> PromptIds:
    """Renders and encodes. The template is the whole truth: no special token is added to its text (spec T14).

    Raises TemplateError without a template (spec T20), EmptyPrompt when the template renders no token, and whatever
    `ChatTemplate.render` raises.
    """
    if template is None:
        raise TemplateError(
            "the model has no chat template, so that messages cannot be made a prompt",
            field="messages",
            hint="give one with --chat-template-file, or send the prompt as text",
        )
    text = template.render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        kwargs=kwargs,
        now=now,
    )
    ids = tokenizer.encode(text, add_special=False)
    if not ids:
        raise EmptyPrompt(
            "the chat template renders no token from these messages",
            field="messages",
            hint="give a message with text, or set add_generation_prompt to true",
        )
    return PromptIds(text, tuple(ids))


def encode_raw(tokenizer: Tokenizer, text: str, add_special: bool = True) -> PromptIds:
    """A text as it is, with what the tokenizer adds around it when `add_special`; never a second BOS (spec T14).

    The empty text is the BOS alone where the tokenizer adds one, else EmptyPrompt. RequestError for half a character.
    """
    refuse_half_characters(text, "prompt")
    ids = tokenizer.encode(text, add_special=add_special)
    if not ids or (not text and not (add_special and tokenizer.adds_bos)):
        raise EmptyPrompt("the prompt is empty: it comes to no token", field="prompt", hint="give a text, or ids")
    return PromptIds(text, tuple(ids))


def check_ids(ids: Iterable[Any], vocab: int, *, field: str = "prompt") -> tuple[int, ...]:
    """Ids as given, once each is known to be an integer in [0, V), V = `vocab`. NumPy integers become plain ints.

    Raises RequestError whose `field` is the position ("prompt[3]"), and EmptyPrompt when there are none.
    """
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(f"{field} is {shown(ids)}, a list of token ids is needed", field=field)
    checked: list[int] = []
    for position, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, Integral):
            place = f"{field}[{position}]"
            raise RequestError(f"{place} is {shown(value)}, a token id is an integer", field=place)
        number = int(value)
        if not 0 <= number < vocab:
            place = f"{field}[{position}]"
            raise RequestError(
                f"{place} is {shown(number)}, the vocabulary holds the ids 0 to {vocab - 1}",
                field=place,
                hint="ids are of this model's own tokenizer: --json shows those of a prompt",
            )
        checked.append(number)
    if not checked:
        raise EmptyPrompt(f"{field} holds no token id", field=field, hint="give at least one")
    return tuple(checked)
