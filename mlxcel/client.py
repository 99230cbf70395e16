"""What LLM and AsyncLLM share: a model of their own, prompts made ready for it, and places for their rows."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlxcel.asked import AskedPrompt
from mlxcel.config import EngineConfig, plugin_limit
from mlxcel.conversation import Conversation, templated
from mlxcel.core.bind_params import Caps
from mlxcel.core.params import SamplingParams
from mlxcel.core.resolve_sampling import Resolved, resolve_sampling
from mlxcel.core.source import NoProgress, Progress
from mlxcel.errors import RequestError, UsageError, shown
from mlxcel.gather import Gathered, Prepared
from mlxcel.load import read_tokenizer
from mlxcel.make_request import make_request
from mlxcel.options import OPTIONS
from mlxcel.places import Places, Ring
from mlxcel.plugins.manager import PluginManager
from mlxcel.running import Running
from mlxcel.serve_engine import Serving, serve
from mlxcel.text.prompt import check_ids

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer

log = logging.getLogger("mlxcel.client")

WAITING: Final = 32
"""Choices that wait beside those that run (docs/spec/engine.md D21). More of them wait as prompts in their callers'
hands."""

UNBOUNDED: Final = 2**31 - 1
"""Of the scheduler's queue: the places bound what comes to it."""

KEYWORDS: Final = frozenset(
    option.name for option in OPTIONS if option.flags and option.in_file and option.group != "model"
)
"""Engine options that a constructor takes (docs/spec/clients.md 0.2)."""


class LocalClient:
    """A model in this process. Its methods may be called from several threads."""

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
        if base_url is not None or api_key is not None:
            raise UsageError(
                f"{'base_url' if base_url is not None else 'api_key'}: this version has no client for a running server",
                hint="leave base_url and api_key out: the model then runs in this process",
            )
        _refuse_unknown(type(self).__name__, options)
        self._config = EngineConfig.resolve({"model": None if model is None else str(model), **options})
        self._progress_wanted = progress
        manager = PluginManager.load(only=plugin_limit(self._config.plugins), trace=_trace(self._config))
        made = read_tokenizer(Path(tokenizer), manager) if isinstance(tokenizer, str | Path) else tokenizer
        self._serving = serve(
            self._config,
            manager,
            self._progress(progress),
            max_queue_depth=UNBOUNDED,
            tokenizer=made,
            say=_tell if progress else log.info,
        )
        self._places = Places(self._serving.model.engine.settings.slots + WAITING)
        self._closing = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _end_in_background, self._serving)
        self._finalizer.atexit = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Cancel what runs, end the threads, free the model. Waits for all that, whoever began it."""
        self._closed = True
        if not self._serving.scheduler.here:  # whoever held the lock is in another process
            return
        with self._closing:
            self._finalizer.detach()
            self._serving.close()

    def _open(self) -> Serving:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make another one")
        if not self._serving.scheduler.here:
            name = type(self).__name__
            raise RuntimeError(
                f"this {name} was made in another process: make one in each, or start processes by spawn"
            )
        return self._serving

    # --- texts --------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: see `mlxcel.core.tokenizer.Tokenizer`."""
        return self._open().model.tokenizer

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with what the tokenizer adds around it (a BOS) unless `add_special_tokens` is false."""
        if not isinstance(text, str):
            raise RequestError(f"text is {shown(text)}, a text is needed", field="text")
        return list(self.get_tokenizer().encode(text, add_special=add_special_tokens))

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens as they are spelled unless they are skipped."""
        model = self._open().model
        checked = check_ids(ids, model.facts.vocab, field="ids") if len(ids) else ()
        return model.tokenizer.decode(checked, skip_special=skip_special_tokens)

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
        conversation = Conversation(
            messages, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs, tools
        )
        return (
            conversation.prompt(templated(self._open().model, chat_template, self._config.chat_template_kwargs)).text
            or ""
        )

    # --- state --------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget every prompt that was kept. What runs keeps its own."""
        self._open().reset_cache()

    def stats(self) -> dict[str, Any]:
        """Numbers of the moment, by name: `scheduler` (docs/spec/clients.md 3.8), `kv` (pages), `prompt_cache`."""
        return self._open().stats()

    # --- requests -------------------------------------------------------------------------------------------------

    def _resolve(self, params: SamplingParams) -> Resolved:
        """Effective parameters; a seed that nobody gave is still to be drawn, for each prompt its own."""
        model = self._open().model
        layers: list[tuple[str, Mapping[str, Any]]] = [("generation_config", model.defaults.sampling)]
        loop = self._config.origins["loop_detection"]
        if loop != "default":
            layers.append((loop, {"loop_detection": self._config.loop_detection}))
        layers.append(("request", {name: getattr(params, name) for name in params.given}))
        return resolve_sampling("lib", *layers, fresh_seed=lambda: -1)

    def _prepare(
        self, asked: AskedPrompt | Conversation, resolved: Resolved, request_id: str | None = None
    ) -> Prepared:
        """A request that can run. RequestError for what this model cannot do."""
        model = self._open().model
        return make_request(
            model,
            asked,
            resolved,
            request_id=request_id or f"req-{secrets.token_hex(8)}",
            caps=Caps(max_n=self._config.max_n, max_logprobs=self._config.max_logprobs),
            template_kwargs=self._config.chat_template_kwargs,
        )

    def _begin(self, prepared: Prepared, ring: Ring, *, heard: Ring | None = None) -> Running | None:
        """Hand a request to the scheduler; None while there is no place for it: `ring` is called when to ask again.
        `heard` is called for each of its events. Raises what `Scheduler.submit` does."""
        serving = self._open()
        held = self._places.size(prepared.choices)
        if not self._places.take(held, ring):
            return None
        try:
            return Running(serving.scheduler.submit(prepared.request), self._places, held, heard)
        except BaseException:
            self._places.give(held)
            raise

    def _gathered(self, prepared: Prepared, *, growing: bool = False) -> Gathered:
        model = self._serving.model
        return Gathered(prepared, model.tokenizer, model.facts.context, growing=growing)

    def _progress(self, wanted: bool) -> Progress:
        if not wanted:
            return NoProgress()
        from mlxcel.cli.progress import console_progress

        return console_progress(no_color=self._config.no_color)


def _refuse_unknown(kind: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in KEYWORDS:
            near = get_close_matches(name, sorted(KEYWORDS | {"model", "tokenizer", "progress"}), n=1, cutoff=0.5)
            words = f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(KEYWORDS))}"
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}{words}")


def _end_in_background(serving: Serving) -> None:
    """For an object that was dropped: the thread that finalizes may hold any lock, so that it must not wait."""
    threading.Thread(target=serving.close, name="mlxcel-close", daemon=True).start()


def _tell(line: str) -> None:
    from mlxcel.cli.streams import tell

    tell(line)


def _trace(config: EngineConfig) -> Any:
    return _tell if config.trace_hooks else None
