"""The model behind the routes: what a request asks of it, made ready and handed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxcel.conversation import Conversation, templated
from mlxcel.core.bind_params import Caps
from mlxcel.core.param_rules import TOKEN_ID
from mlxcel.core.request_names import OUR_NAME, canonical
from mlxcel.core.resolve_sampling import Resolved, resolve_sampling
from mlxcel.errors import RequestError
from mlxcel.make_request import Terms, make_request
from mlxcel.server.refusals import ModelNotFound
from mlxcel.server.settings import ServerSettings
from mlxcel.version import version

if TYPE_CHECKING:
    from mlxcel.asked import AskedPrompt
    from mlxcel.config import EngineConfig
    from mlxcel.core.reply import Reply
    from mlxcel.core.request import Request
    from mlxcel.core.tokenizer import Tokenizer
    from mlxcel.gather import Prepared
    from mlxcel.prepare import Prompt
    from mlxcel.serve_engine import Serving


class ServedModel:
    """A model that serves. All methods may be called from any thread, and none waits for the engine."""

    def __init__(
        self,
        serving: Serving,
        config: EngineConfig,
        settings: ServerSettings,
        *,
        submitted: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """`submitted` is told of each request that the scheduler took."""
        self.serving = serving
        self._submitted = submitted
        self._config, self._settings = config, settings
        model = serving.model
        self.names: Sequence[str] = config.served_model_name or (model.facts.name,)
        self.caps = Caps(max_n=config.max_n, max_logprobs=config.max_logprobs)
        facts, engine = model.facts, model.engine
        weights = engine.settings.identity.fingerprint[:12]
        self.fingerprint = f"mlxcel-{version()}-{model.backend}-{engine.level}-{model.caps.dtype}-{weights}"
        self.vocab, self.context = facts.vocab, facts.context

    @property
    def tokenizer(self) -> Tokenizer:
        return self.serving.model.tokenizer

    @property
    def kv_requested(self) -> str:
        """What was asked for of where the KV lives: `auto`, or a name."""
        return self._config.kv_storage

    @property
    def room(self) -> bool:
        """Whether the queue's bound would let a prompt in now."""
        return self.serving.scheduler.room

    def named(self, asked: str | None) -> str:
        """The name that a reply gives: the one that was asked for, else the first. ModelNotFound."""
        if not asked:
            return self.names[0]
        if asked not in self.names:
            raise ModelNotFound(asked, self.names)
        return asked

    def resolve(self, given: Mapping[str, Any]) -> Resolved:
        """Effective parameters of a request's fields, under any of their names, with the origin of each: the request,
        then the operator's flags, then the model's own defaults, then the server's. A seed that nobody gave is still to
        be drawn, for each prompt its own.

        RequestError for a value out of range, ids beyond the vocabulary included, and under `--strict` for one that
        cannot act.
        """
        asked = canonical(given)
        self._check_ids(given)
        layers: list[tuple[str, Mapping[str, Any]]] = [("generation_config", self.serving.model.defaults.sampling)]
        loop = self._config.origins["loop_detection"]
        if loop != "default":
            layers.append((loop, {"loop_detection": self._config.loop_detection}))
        layers += [("flag", self._settings.sampling), ("request", asked)]
        return resolve_sampling("srv", *layers, strict=self._settings.strict, fresh_seed=lambda: -1)

    def prepare(
        self,
        prompt: AskedPrompt | Conversation,
        resolved: Resolved,
        *,
        request_id: str,
        isolation: bytes | None = None,
        salt: str | None = None,
        lane: int = 1,
        use_cache: bool = True,
        timeout: float | None = None,
        echo: bool = False,
        progress: bool = False,
    ) -> Prepared:
        """A request that can run. `timeout` None: the operator's. RequestError for what this model cannot do. Encoding
        a long prompt takes its time: not for the event loop."""
        return make_request(
            self.serving.model,
            prompt,
            resolved,
            request_id=request_id,
            caps=self.caps,
            terms=Terms(
                lane=lane,
                timeout=self._settings.timeout if timeout is None else timeout,
                cache_prompt=use_cache,
                progress=progress,
                cache_salt=salt,
                isolation=isolation,
                echo=echo,
            ),
            template_kwargs=self._config.chat_template_kwargs,
            strict=self._settings.strict,
        )

    def render(self, conversation: Conversation) -> Prompt:
        """The prompt of a conversation, which may be longer than the context. RequestError, TemplateError."""
        model = templated(self.serving.model, conversation.chat_template, self._config.chat_template_kwargs)
        return conversation.prompt(model)

    def submit(self, prepared: Prepared) -> Reply:
        """Raises as `Scheduler.submit` does."""
        reply = self.serving.scheduler.submit(prepared.request)
        self._submitted(prepared.request)
        return reply

    def _check_ids(self, given: Mapping[str, Any]) -> None:
        """The ids of a request's fields, whose shape was checked, by the place that the client gave them."""
        for name, value in given.items():
            field = OUR_NAME.get(name)
            if value is None:
                continue
            if field in ("stop_token_ids", "allowed_token_ids"):
                for place, token in enumerate(value):
                    self._check_id(f"{name}[{place}]", token)
            elif field == "logit_bias":
                if isinstance(value, Mapping):
                    for key in value:
                        self._check_id(f'{name}["{key}"]', int(key))
                else:
                    for place, (token, _) in enumerate(value):
                        if not isinstance(token, str):
                            self._check_id(f"{name}[{place}]", token)

    def _check_id(self, place: str, token: int) -> None:
        if TOKEN_ID(place, token) >= self.vocab:
            raise RequestError(
                f"{place}: {token} is not in the vocabulary, whose ids are 0 to {self.vocab - 1}", field=place
            )
