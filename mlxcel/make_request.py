"""From a prompt and resolved parameters to a request that the scheduler can run: the same for every client that has
one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.asked import AskedPrompt
from mlxcel.choices import choices
from mlxcel.conversation import Conversation, templated
from mlxcel.core.bind_params import Caps, reply_bound
from mlxcel.core.prompt_ids import truncate_prompt
from mlxcel.core.request import Request
from mlxcel.errors import RequestError
from mlxcel.gather import Prepared
from mlxcel.prepare import Prompt, raw_prompt, sequence_spec
from mlxcel.text.echo import echoed
from mlxcel.text.prompt import check_ids

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams
    from mlxcel.core.resolve_sampling import Resolved
    from mlxcel.load import LoadedModel


@attrs.frozen
class Terms:
    """Of a request, besides its prompt and parameters. `lane`, `timeout` (seconds, 0: none), `cache_prompt` and
    `progress` as in Request; `cache_salt`, `isolation` and `echo` as in SequenceSpec."""

    lane: int = 1
    timeout: float = 0.0
    cache_prompt: bool = True
    progress: bool = False
    cache_salt: str | None = None
    isolation: bytes | None = None
    echo: bool = False


def make_request(
    model: LoadedModel,
    asked: AskedPrompt | Conversation,
    resolved: Resolved,
    *,
    request_id: str,
    caps: Caps,
    terms: Terms = Terms(),
    template_kwargs: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Prepared:
    """Checked, its seed drawn. `template_kwargs` are the operator's variables of chat templates.

    RequestError for what this model cannot do or the operator does not allow, and with `strict` for a value that cannot
    act on a prompt of this kind.
    """
    params, warnings = resolved.params, resolved.warnings
    if isinstance(asked, Conversation) and params.add_special_tokens:
        words = "add_special_tokens has no effect on a chat: its template writes all of its special tokens"
        if strict:
            raise RequestError(words, field="add_special_tokens", hint="leave it out")
        warnings = (*warnings, words)
    if params.seed == -1:
        params = params.clone(seed=secrets.randbits(63))
    if isinstance(asked, Conversation):
        model = templated(model, asked.chat_template, template_kwargs)
    prompt = prompt_of(model, asked, params)
    made = sequence_spec(model, prompt, params, request_id=request_id, caps=caps)
    made = attrs.evolve(made, echo=terms.echo, cache_salt=terms.cache_salt, isolation=terms.isolation)
    if made.params.logits_processors:
        model.engine.check_sampling(made)  # a plugin says what it takes: not once a reply has begun
    before = ""
    if terms.echo:
        fed, _ = truncate_prompt(made, model.facts.context)
        whole = reply_bound(made.params, len(fed.prompt_ids), model.facts.context) == 0
        before = echoed(model.tokenizer, fed, whole=whole)
    request = Request(
        choices(made),
        lane=terms.lane,
        timeout=terms.timeout,
        cache_prompt=terms.cache_prompt,
        progress=terms.progress,
        before=before,
        origin=resolved.origin,
        warnings=warnings,
    )
    return Prepared(request, prompt.text)


def prompt_of(model: LoadedModel, asked: AskedPrompt | Conversation, params: SamplingParams) -> Prompt:
    """The ids of a prompt, and where they are from; of a conversation by the template of `model`. RequestError."""
    if isinstance(asked, Conversation):
        return asked.prompt(model)
    if asked.text is not None:
        return raw_prompt(model, asked.text, params)
    return Prompt(check_ids(() if asked.ids is None else asked.ids, model.facts.vocab))
