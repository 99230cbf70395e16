"""What LLM and AsyncLLM share: a client, in this process or connected to a server, and the calls that hand on to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlxcel.conversation import Conversation
from mlxcel.core.params import SamplingParams
from mlxcel.core.source import Progress
from mlxcel.errors import RequestError, shown
from mlxcel.places import Places, Ring

if TYPE_CHECKING:
    from mlxcel.asked import AskedPrompt
    from mlxcel.core.tokenizer import Tokenizer
    from mlxcel.outputs import RequestOutput, StreamDelta


class Sent(Protocol):
    """A request on its way, with the places it holds."""

    @property
    def ended(self) -> bool:
        """Whether every choice ended and every event was read."""

    def events(self) -> Iterator[Any]:
        """Those that are there, for `Came.take`."""

    def __iter__(self) -> Iterator[Any]:
        """All to the end, waiting for each."""

    def cancel(self) -> None:
        """End what still runs; harmless behind the end. Does not wait."""


class Came(Protocol):
    """What came of a request, so far."""

    @property
    def finished(self) -> bool: ...

    def take(self, event: Any) -> StreamDelta | None:
        """Take an event in; what a reader of deltas hears of it."""

    def output(self) -> RequestOutput:
        """All of it as it is now."""

    def refused(self, error: Exception) -> RequestOutput:
        """Of a request that was not taken."""

    def drop(self) -> list[StreamDelta]:
        """End a request that nobody took. The deltas of its end."""


class Client(Protocol):
    """Runs requests. Methods may be called from several threads; what they raise is of mlxcel/errors.py."""

    places: Places

    def check_open(self) -> None:
        """RuntimeError once it is closed, and in a process that was forked off."""

    def close(self) -> None:
        """Cancel what runs and give everything back. Again: nothing."""

    def get_tokenizer(self) -> Tokenizer: ...

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def render(self, conversation: Conversation) -> str: ...

    def reset_prefix_cache(self) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def progress(self, wanted: bool | None) -> Progress:
        """Bars, or none; None is what was wanted when it was made."""

    def resolve(self, params: SamplingParams) -> Any:
        """Effective parameters, for `prepare`."""

    def prepare(self, asked: AskedPrompt | Conversation, resolved: Any, request_id: str | None = None) -> Any:
        """A request that can run, for `begin`. RequestError for what this model cannot do."""

    def begin(self, prepared: Any, ring: Ring, *, heard: Ring | None = None) -> Sent | None:
        """Send it; None while there is no place for it: `ring` is called when to ask again. `heard` is called for each
        of its events."""

    def gathered(self, prepared: Any, *, growing: bool = False) -> Came: ...


def connect(
    kind: str,
    model: str | Path | None,
    *,
    tokenizer: str | Path | Tokenizer | None,
    progress: bool,
    base_url: str | None,
    api_key: str | None,
    options: Mapping[str, Any],
) -> Client:
    """A client for the arguments of `kind`, LLM or AsyncLLM. TypeError for keywords that there are none of."""
    if base_url is None:
        if api_key is not None:
            raise TypeError(f"{kind}() got api_key without base_url: a model in this process needs no key")
        from mlxcel.local_client import LocalClient

        return LocalClient(kind, model, tokenizer, progress, options)
    given = [*options, *(["tokenizer"] if tokenizer is not None else [])]
    if given:
        raise TypeError(
            f"{kind}() got {given[0]!r} beside base_url: engine options are the server's, `mlxcel serve` takes them"
        )
    from mlxcel.remote_client import RemoteClient

    return RemoteClient(kind, base_url, api_key, None if model is None else str(model), progress)


class Connected:
    """Base of LLM and AsyncLLM."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        progress: bool = False,
        base_url: str | None = None,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        self._client = connect(
            type(self).__name__,
            model,
            tokenizer=tokenizer,
            progress=progress,
            base_url=base_url,
            api_key=api_key,
            options=options,
        )

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: see `mlxcel.core.tokenizer.Tokenizer`. UsageError where a server has it."""
        return self._client.get_tokenizer()

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with what the tokenizer adds around it (a BOS) unless `add_special_tokens` is false."""
        if not isinstance(text, str):
            raise RequestError(f"text is {shown(text)}, a text is needed", field="text")
        return self._client.tokenize(text, add_special_tokens)

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens as they are spelled unless they are skipped."""
        return self._client.detokenize(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of the prompt that `chat` would run."""
        return self._client.render(
            Conversation(
                messages, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs, tools
            )
        )

    def reset_prefix_cache(self) -> None:
        """Forget every prompt that was kept. What runs keeps its own."""
        self._client.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Numbers of the moment, by name: `scheduler` (docs/spec/clients.md 3.8), `kv` (pages), `prompt_cache`; of a
        server the last one alone."""
        return self._client.stats()
