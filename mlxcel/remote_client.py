"""A client of a server that runs (docs/spec/clients.md 2.1): the same requests over HTTP."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mlxcel.asked import AskedPrompt
from mlxcel.conversation import Conversation
from mlxcel.core.bind_params import check_bounds, reply_bound
from mlxcel.core.params import SamplingParams
from mlxcel.core.source import NoProgress, Progress
from mlxcel.errors import ContextTooLong, EmptyPrompt, ServerError, UnknownModel, UsageError
from mlxcel.places import Places, Ring
from mlxcel.remote_fields import request_fields
from mlxcel.remote_http import Address, call
from mlxcel.remote_reply import RemoteReply
from mlxcel.remote_request import RemoteRequest
from mlxcel.remote_sending import Sending
from mlxcel.text.prompt import check_ids

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer

CONNECTIONS: Final = 32
"""Choices that are asked for at once, each request on a connection of its own."""

PING: Final = 15
"""Seconds after which a stream without news says that it is there."""


class RemoteClient:
    """Methods may be called from several threads; each request is read by a thread of its own.

    What the server is asked first is which model it serves: ServerError where it cannot be reached or lets nobody in,
    UnknownModel where it serves none of the name `model`.
    """

    def __init__(self, kind: str, base_url: str, api_key: str | None, model: str | None, progress: bool) -> None:
        self._kind, self._progress_wanted = kind, progress
        self._address = Address.parse(base_url, api_key)
        self._process = os.getpid()
        self._closed = False
        self._named = {} if model is None else {"model": model}
        self._sent: weakref.WeakSet[Sending] = weakref.WeakSet()
        self.places = Places(CONNECTIONS)
        served = self._call("GET", "/v1/models")
        try:
            names = [entry["id"] for entry in served["data"]]
            meta = served["data"][0]["meta"]
            self._context, self._vocab = int(meta["n_ctx"]), int(meta["n_vocab"])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ServerError(
                f"{self._address.url} does not say which model it serves", hint="is it `mlxcel serve`?"
            ) from error
        if model is not None and model not in names:
            raise UnknownModel(f"{self._address.url} serves no model {model!r}", hint=f"there is {', '.join(names)}")

    # --- life ---------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {self._kind} is closed: make another one")
        if self._process != os.getpid():
            raise RuntimeError(
                f"this {self._kind} was made in another process: make one in each, or start processes by spawn"
            )

    def close(self) -> None:
        """Close the connections, and wait for the threads that read them."""
        self._closed = True
        if self._process != os.getpid():
            return
        sent = list(self._sent)
        for sending in sent:
            sending.cancel()
        for sending in sent:
            sending.join()

    # --- texts and state ----------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        self.check_open()
        raise UsageError("the tokenizer is the server's", hint="tokenize, detokenize and apply_chat_template ask it")

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        found: list[int] = self._call("POST", "/tokenize", {"content": text, "add_special": bool(add_special_tokens)})[
            "tokens"
        ]
        return found

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        checked = check_ids(ids, self._vocab, field="ids") if len(ids) else ()
        body = {"tokens": list(checked), "skip_special_tokens": bool(skip_special_tokens)}
        return str(self._call("POST", "/detokenize", body)["content"])

    def render(self, conversation: Conversation) -> str:
        return str(self._call("POST", "/apply-template", _fields_of(conversation))["prompt"])

    def reset_prefix_cache(self) -> None:
        self._call("POST", "/v1/cache/reset")

    def stats(self) -> dict[str, Any]:
        """Of the prompt cache, as GET /v1/cache/stats says it; None where it is off."""
        found = self._call("GET", "/v1/cache/stats")
        return {"prompt_cache": found if found.get("enabled") else None}

    def progress(self, wanted: bool | None) -> Progress:
        if not (self._progress_wanted if wanted is None else wanted):
            return NoProgress()
        from mlxcel.cli.progress import console_progress
        from mlxcel.config import EngineConfig

        return console_progress(no_color=EngineConfig.resolve().no_color)

    # --- requests -----------------------------------------------------------------------------------------------------

    def resolve(self, params: SamplingParams) -> SamplingParams:
        return params

    def prepare(
        self, asked: AskedPrompt | Conversation, resolved: SamplingParams, request_id: str | None = None
    ) -> RemoteRequest:
        """Checked as far as that goes without a place in the server's queue: the prompt's length, its ids, and for a
        conversation all of it."""
        self.check_open()
        params = resolved if resolved.seed != -1 else resolved.clone(seed=secrets.randbits(63))
        chat = isinstance(asked, Conversation)
        fields = {**self._named, **request_fields(params, resolved.given, chat=chat)}
        if isinstance(asked, Conversation):
            own = {**fields, **_fields_of(asked)}
            made = self._call("POST", "/apply-template", {**own, "explain": True})
            text, ids = made["prompt"], tuple(made["token_ids"])
        else:
            text = asked.text
            ids = (
                self._encoded(text, params)
                if text is not None
                else check_ids(() if asked.ids is None else asked.ids, self._vocab)
            )
            own = {**fields, "prompt": list(ids) if text is None else text}
            self._check(ids, params)
        stream = {"stream": True, "stream_options": {"include_usage": True}, "sse_ping_interval": PING}
        return RemoteRequest(
            route="/v1/chat/completions" if chat else "/v1/completions",
            body={**own, **stream, "return_token_ids": True},
            request_id=request_id or f"req-{secrets.token_hex(8)}",
            prompt=text,
            prompt_ids=ids,
            params=self._in_force(params, added=not chat and text is not None),
        )

    def begin(self, prepared: RemoteRequest, ring: Ring, *, heard: Ring | None = None) -> Sending | None:
        self.check_open()
        held = self.places.size(prepared.choices)
        if not self.places.take(held, ring):
            return None
        try:
            sending = Sending(self._address, prepared, self.places, held, heard)
        except BaseException:
            self.places.give(held)
            raise
        self._sent.add(sending)
        return sending

    def gathered(self, prepared: RemoteRequest, *, growing: bool = False) -> RemoteReply:
        return RemoteReply(prepared)

    def _in_force(self, params: SamplingParams, *, added: bool) -> SamplingParams:
        """As the server takes them for a model of this vocabulary."""
        added = added and params.add_special_tokens is not False
        counts = {name: self._vocab for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1}
        return params.clone(top_k=min(params.top_k, self._vocab), add_special_tokens=added, **counts)

    def _encoded(self, text: str, params: SamplingParams) -> tuple[int, ...]:
        body = {"prompt": text, "add_special_tokens": params.add_special_tokens is not False}
        ids = tuple(self._call("POST", "/tokenize", body)["tokens"])
        if not ids:
            raise EmptyPrompt("the prompt is empty: it comes to no token", field="prompt", hint="give a text, or ids")
        return ids

    def _check(self, ids: Sequence[int], params: SamplingParams) -> None:
        """What is known here of a plain prompt and its parameters."""
        cut = params.truncate_prompt_tokens is not None
        if not cut and len(ids) >= self._context:
            raise ContextTooLong(len(ids), self._context)
        by_id = tuple((token, added) for token, added in params.logit_bias if not isinstance(token, str))
        length = 1 if cut else len(ids)
        check_bounds(
            params.clone(logit_bias=by_id),
            vocab=self._vocab,
            max_new=reply_bound(params, length, self._context),
        )

    def _call(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        self.check_open()
        return call(self._address, method, route, body)


def _fields_of(conversation: Conversation) -> dict[str, Any]:
    """Those that are given."""
    fields = {
        "messages": conversation.messages,
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        "chat_template": conversation.chat_template,
        "chat_template_kwargs": conversation.chat_template_kwargs,
        "tools": conversation.tools or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
