"""A client with a model of its own: prompts made ready for it, and places for their rows."""

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
    """A model in this process, and a thread that runs it. Methods may be called from several threads.

    The `Client` of LLM and AsyncLLM unless they are connected to a server; `kind` is which of them, for messages.
    """

    def __init__(
        self,
        kind: str,
        model: str | Path | None,
        tokenizer: str | Path | Tokenizer | None,
        progress: bool,
        options: Mapping[str, Any],
    ) -> None:
        _refuse_unknown(kind, options)
        self._kind = kind
        self._config = EngineConfig.resolve({"model": None if model is None else str(model), **options})
        self._progress_wanted = progress
        manager = PluginManager.load(only=plugin_limit(self._config.plugins), trace=_trace(self._config))
        made = read_tokenizer(Path(tokenizer), manager) if isinstance(tokenizer, str | Path) else tokenizer
        self._serving = serve(
            self._config,
            manager,
            self.progress(progress),
            max_queue_depth=UNBOUNDED,
            tokenizer=made,
            say=_tell if progress else log.info,
        )
        self.places = Places(self._serving.model.engine.settings.slots + WAITING)
        self._closing = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _end_in_background, self._serving)
        self._finalizer.atexit = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs, end the threads, free the model. Waits for all that, whoever began it."""
        self._closed = True
        if not self._serving.scheduler.here:  # whoever held the lock is in another process
            return
        with self._closing:
            self._finalizer.detach()
            self._serving.close()

    def check_open(self) -> None:
        """RuntimeError once it is closed, and in a process that was forked off."""
        self._open()

    def _open(self) -> Serving:
        if self._closed:
            raise RuntimeError(f"this {self._kind} is closed: make another one")
        if not self._serving.scheduler.here:
            raise RuntimeError(
                f"this {self._kind} was made in another process: make one in each, or start processes by spawn"
            )
        return self._serving

    # --- texts --------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        return self._open().model.tokenizer

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.get_tokenizer().encode(text, add_special=add_special_tokens))

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        model = self._open().model
        checked = check_ids(ids, model.facts.vocab, field="ids") if len(ids) else ()
        return model.tokenizer.decode(checked, skip_special=skip_special_tokens)

    def render(self, conversation: Conversation) -> str:
        model = templated(self._open().model, conversation.chat_template, self._config.chat_template_kwargs)
        return conversation.prompt(model).text or ""

    # --- state --------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        self._open().reset_cache()

    def stats(self) -> dict[str, Any]:
        return self._open().stats()

    # --- requests -------------------------------------------------------------------------------------------------

    def resolve(self, params: SamplingParams) -> Resolved:
        """Effective parameters; a seed that nobody gave is still to be drawn, for each prompt its own."""
        model = self._open().model
        layers: list[tuple[str, Mapping[str, Any]]] = [("generation_config", model.defaults.sampling)]
        loop = self._config.origins["loop_detection"]
        if loop != "default":
            layers.append((loop, {"loop_detection": self._config.loop_detection}))
        layers.append(("request", {name: getattr(params, name) for name in params.given}))
        return resolve_sampling("lib", *layers, fresh_seed=lambda: -1)

    def prepare(self, asked: AskedPrompt | Conversation, resolved: Resolved, request_id: str | None = None) -> Prepared:
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

    def begin(self, prepared: Prepared, ring: Ring, *, heard: Ring | None = None) -> Running | None:
        """Hand a request to the scheduler; None while there is no place for it: `ring` is called when to ask again.
        `heard` is called for each of its events. Raises what `Scheduler.submit` does."""
        serving = self._open()
        held = self.places.size(prepared.choices)
        if not self.places.take(held, ring):
            return None
        try:
            return Running(serving.scheduler.submit(prepared.request), self.places, held, heard)
        except BaseException:
            self.places.give(held)
            raise

    def gathered(self, prepared: Prepared, *, growing: bool = False) -> Gathered:
        model = self._serving.model
        return Gathered(prepared, model.tokenizer, model.facts.context, growing=growing)

    def progress(self, wanted: bool | None) -> Progress:
        if not (self._progress_wanted if wanted is None else wanted):
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
