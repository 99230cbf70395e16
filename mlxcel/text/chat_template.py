"""Chat templates: messages to the text of a prompt, by the template of the operator or of the checkpoint.

Jinja is imported by the first render, not by this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mlxcel.errors import CheckpointError, RequestError, TemplateError, UsageError, shown
from mlxcel.text.messages import checked_messages, refuse_vanished
from mlxcel.text.special_tokens import SPECIAL_TOKEN_NAMES, special_tokens

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint

MAX_WORDS: Final = 512  # characters of a template's own words in an error
MAX_SOURCE: Final = 1 << 20  # the longest known has about 2**15 characters
GRANTED: Final[Mapping[str, Any]] = {"enable_thinking": True}
RESERVED: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
) | frozenset(SPECIAL_TOKEN_NAMES)


class _Refusal(Exception):
    """`raise_exception(words)`."""


class ChatTemplate:
    """A template with the special tokens it may name. Rendering has no side effect and may run in several threads.

    `special_tokens` maps variables ("bos_token") to spellings; `origin` says where the template is from, for people.
    `kwargs` are the operator's variables; those of a request win over them. `keeps_texts=False` is for a template that
    rewrites texts: then no message is looked for in the prompt (spec T19).
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        origin: str,
        kwargs: Mapping[str, Any] | None = None,
        keeps_texts: bool = True,
    ) -> None:
        """RequestError for reserved names in `kwargs`."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.origin = origin
        self._kwargs = self._checked_kwargs(kwargs)
        self._keeps_texts = keeps_texts

    def check(self) -> None:
        """Compiles the template. Raises TemplateError where it does not; `render` would do so at its first call."""
        try:
            _ = self._compiled
        except Exception as error:
            self._fail(error)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        now: float,
    ) -> str:
        """The prompt's text (spec T12 to T19).

        `now` is the request's time in seconds since the epoch; `strftime_now(format)` writes its whole seconds in the
        local time zone. `continue_final_message` leaves the last message, which must be the assistant's, open: the
        prompt ends with its content; it excludes `add_generation_prompt`. `kwargs` are more variables; of them
        `enable_thinking` is true where nobody gives it and the template has no default of its own (spec T11).
        Raises TemplateError (with the template's own words, when these are the reason), or RequestError for messages
        of a wrong shape, reserved names in `kwargs`, and a message that the template left out.
        """
        conversation = checked_messages(messages)
        extra = {**self._kwargs, **self._checked_kwargs(kwargs)}
        sentinel = ""
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt are both true, and exclude each other",
                    field="continue_final_message",
                    hint="set add_generation_prompt to false to continue the last message",
                )
            sentinel = _leave_open(conversation)
        try:
            run, unset = self._compiled
            prompt = run(
                {
                    "documents": None,
                    **unset,
                    **extra,
                    **self.special_tokens,
                    "messages": conversation,
                    "tools": None,
                    "add_generation_prompt": add_generation_prompt,
                    "raise_exception": _raise_exception,
                    "strftime_now": datetime.fromtimestamp(math.floor(now)).strftime,
                },
            )
        except Exception as error:
            self._fail(error)
        if sentinel:
            prompt = _cut_open(prompt, sentinel, conversation[-1]["content"].removesuffix(sentinel))
        if self._keeps_texts:
            refuse_vanished(conversation, prompt)
        return prompt

    def _checked_kwargs(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise RequestError(
                f"chat_template_kwargs is {shown(kwargs)}, an object is needed", field="chat_template_kwargs"
            )
        for name in kwargs or ():
            if not isinstance(name, str) or name in RESERVED or name in self.special_tokens:
                raise RequestError(
                    f"chat_template_kwargs has {shown(name)}, a name that the request itself or the model gives",
                    field=f"chat_template_kwargs.{name}",
                    hint=f"leave it out; reserved are {', '.join(sorted(RESERVED))}",
                )
        return dict(kwargs or {})

    @cached_property
    def _compiled(self) -> tuple[Callable[[Mapping[str, Any]], str], Mapping[str, Any]]:
        """The template as a function, variables to text, and the variables it takes for granted."""
        from mlxcel.text.sandbox import TemplateEnvironment

        if len(self.source) > MAX_SOURCE:
            raise ValueError(f"it has {len(self.source)} characters, at most {MAX_SOURCE} are taken")
        environment = TemplateEnvironment()
        run = partial(environment.render, environment.compiled(self.source))
        return run, {name: value for name, value in GRANTED.items() if environment.takes_for_granted(self.source, name)}

    def _fail(self, error: Exception) -> NoReturn:
        """TemplateError for whatever came out of Jinja."""
        if isinstance(error, _Refusal):
            words = str(error) or "the chat template refused the messages without a word"
            raise TemplateError(words[:MAX_WORDS], field="messages", origin=self.origin) from None
        fault = f"the chat template failed: {type(error).__name__}: {error}"
        raise TemplateError(
            fault[:MAX_WORDS],
            field="messages",
            hint=f"the template is from {self.origin}; --chat-template-file takes another one",
            origin=self.origin,
        ) from error


def _raise_exception(words: object = "") -> NoReturn:
    raise _Refusal(str(words))


def _leave_open(conversation: list[dict[str, Any]]) -> str:
    """Puts a sentinel behind the last message's content and returns it. RequestError unless it is the assistant's."""
    last = conversation[-1]
    if last["role"] != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of the assistant, it is of role {shown(last['role'])}",
            field=f"messages[{len(conversation) - 1}].role",
        )
    sentinel = "continuehere"
    while any(sentinel in message["content"] for message in conversation):
        sentinel += "x"
    last["content"] += sentinel
    return sentinel


def _cut_open(prompt: str, sentinel: str, content: str) -> str:
    """The prompt up to the sentinel, which stands behind the last message's content. White space before that, which
    templates trim, does not count; anything else that is missing would continue another message."""
    before, found, _ = prompt.rpartition(sentinel)
    before = before.replace(sentinel, "")  # of a template that writes the content more than once
    if not found or not before.endswith(content.lstrip()):
        raise TemplateError(
            "the chat template does not write the last message as it is, so that it cannot be continued",
            field="continue_final_message",
            hint="ask without continue_final_message",
        )
    return before


def select_template(
    checkpoint: Checkpoint,
    *,
    flag_text: str | None = None,
    flag_file: Path | str | None = None,
    flag_kwargs: Mapping[str, Any] | None = None,
) -> ChatTemplate | None:
    """The template by the order of spec T12, None where nobody gives one. `flag_kwargs` are the operator's variables.

    The operator's comes first and is compiled here: UsageError when it cannot be. A template of the checkpoint that
    does not compile fails its renders, so that raw prompts still run. CheckpointError for one that is no string.
    """
    try:
        template = _selected(checkpoint, flag_text, flag_file, flag_kwargs)
    except RequestError as error:  # of the operator's own variables
        raise UsageError(f"--chat-template-kwargs: {error.message}", hint=error.hint) from error
    if template is None and flag_kwargs:
        raise UsageError(
            "--chat-template-kwargs has no chat template to act on: the model holds none",
            hint="leave it out, or give a template with --chat-template-file",
        )
    return template


def _selected(
    checkpoint: Checkpoint, flag_text: str | None, flag_file: Path | str | None, kwargs: Mapping[str, Any] | None
) -> ChatTemplate | None:
    tokens = special_tokens(checkpoint)
    operators = _operators_template(flag_text, flag_file)
    if operators is not None:
        source, origin = operators
        template = ChatTemplate(source, special_tokens=tokens, origin=origin, kwargs=kwargs)
        try:
            template.check()
        except TemplateError as error:
            raise UsageError(f"{origin}: {error.message}", hint="correct the template") from error
        return template
    for key, value in _candidates(checkpoint.assets):
        found = _default_of(value, f"{checkpoint.path}: {key}")
        if found is not None:
            return ChatTemplate(found, special_tokens=tokens, origin=key, kwargs=kwargs)
    return None


def _operators_template(text: str | None, file: Path | str | None) -> tuple[str, str] | None:
    """Source and origin."""
    if text is not None and file is not None:
        raise UsageError("--chat-template and --chat-template-file are both given", hint="leave one of them out")
    if file is not None:
        try:
            with Path(file).open("rb") as stream:
                data = stream.read(4 * MAX_SOURCE + 1)
            source = data.decode("utf-8")
        except OSError as error:
            raise UsageError(f"--chat-template-file {file} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(
                f"--chat-template-file {file} is not UTF-8: {error.reason} at byte {error.start}"
            ) from error
        origin = f"--chat-template-file {file}"
    elif text is not None:
        source, origin = text, "--chat-template"
    else:
        return None
    if "{{" not in source and "{%" not in source:
        raise UsageError(
            f"{origin} holds no template: {shown(source)} has neither {{{{ }}}} nor {{% %}}",
            hint="--chat-template takes the text of a Jinja template, --chat-template-file the name of a file with one",
        )
    return source, origin


def _candidates(assets: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Where a checkpoint may hold its template, first to last, with what stands there."""
    gguf = assets.get("gguf", {})
    return [
        ("chat_template.jinja", assets.get("chat_template.jinja")),
        ("chat_template.json", assets.get("chat_template.json", {}).get("chat_template")),
        ("tokenizer_config.json", assets.get("tokenizer_config.json", {}).get("chat_template")),
        ("tokenizer.chat_template", gguf.get("tokenizer.chat_template")),
        ("tokenizer.chat_template.default", gguf.get("tokenizer.chat_template.default")),
    ]


def _default_of(value: Any, what: str) -> str | None:
    """A template, or of several named ones `default`, or the only one."""
    if isinstance(value, list):
        try:
            named = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                f"{what}: chat_template is a list of something else than names and templates"
            ) from error
        value = named
    if isinstance(value, Mapping):
        value = value.get("default", next(iter(value.values())) if len(value) == 1 else None)
    if value is None or isinstance(value, str):
        return value or None
    raise CheckpointError(
        f"{what}: the chat template is {shown(value)}, a string or a list of named templates is needed",
        hint="give one with --chat-template-file",
    )
