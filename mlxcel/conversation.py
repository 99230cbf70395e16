"""A conversation on its way to a prompt: messages, the template that renders them, and what it is told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.errors import RequestError, UnsupportedField, shown
from mlxcel.prepare import Prompt, chat_prompt
from mlxcel.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from mlxcel.load import LoadedModel


@attrs.frozen
class Conversation:
    """Messages, and how they become a prompt. Fields as in docs/spec/clients.md 2.1."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None

    def prompt(self, model: LoadedModel) -> Prompt:
        """By the template of `model`, whichever `chat_template` says: see `templated`. RequestError, TemplateError,
        EmptyPrompt."""
        if self.tools:
            raise UnsupportedField("tools are not in this version", field="tools", hint="leave them out")
        return chat_prompt(
            model,
            self.messages,
            kwargs=self.chat_template_kwargs,
            now=time.time(),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


def templated(model: LoadedModel, source: str | None, kwargs: Mapping[str, Any] | None) -> LoadedModel:
    """The model, with a request's own template if it has one. `kwargs` are the operator's variables."""
    if source is None:
        return model
    if not isinstance(source, str):
        raise RequestError(f"chat_template is {shown(source)}, a text is needed", field="chat_template")
    template = ChatTemplate(source, special_tokens=_special_tokens(model), origin="chat_template", kwargs=kwargs)
    return attrs.evolve(model, template=template)


def _special_tokens(model: LoadedModel) -> Mapping[str, str]:
    if model.template is not None:
        return model.template.special_tokens
    tokenizer = model.tokenizer
    return {f"{role}_token": tokenizer.token_text(token) for role, token in tokenizer.special_ids.items()}
