"""Which model a tool measures: one that is named, or random weights of a published shape (docs/spec/clients.md 6.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import UsageError
from mlxcel.load import LoadedModel, choose_tokenizer, load_model, open_checkpoint
from mlxcel.resolve import resolve_model
from mlxcel.serve_engine import Serving, serve
from mlxcel.store import ModelStore
from mlxcel.testing.random_checkpoint import SHAPES, RandomCheckpoint, random_checkpoint
from mlxcel.tools.prompts import built_in_prompt, random_prompt
from mlxcel.tools.random_tokenizer import RandomTokenizer

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager


@attrs.frozen(eq=False)
class ChosenModel:
    """The model that a configuration names; with `checkpoint`, that one in its place. It can be loaded any number of
    times, one after the other."""

    name: str
    checkpoint: RandomCheckpoint | None = None

    @property
    def random(self) -> bool:
        """Whether its weights are."""
        return self.checkpoint is not None

    @property
    def vocab(self) -> int | None:
        """V of random weights; of a named model it is known once that is loaded."""
        return None if self.checkpoint is None else int(self.checkpoint.config["vocab_size"])

    def load(self, config: EngineConfig, manager: PluginManager, progress: Progress, **asked: Any) -> LoadedModel:
        """As `mlxcel.load.load_model`."""
        return load_model(config, manager, progress, **self._place(), **asked)

    def serve(self, config: EngineConfig, manager: PluginManager, progress: Progress, **asked: Any) -> Serving:
        """As `mlxcel.serve_engine.serve`."""
        return serve(config, manager, progress, **self._place(), **asked)

    @contextmanager
    def opened(
        self,
        config: EngineConfig,
        manager: PluginManager,
        progress: Progress,
        say: Callable[[str], None] = lambda line: None,
    ) -> Iterator[Checkpoint]:
        """The checkpoint, of which no weight is read yet. Raises as `load_model` does."""
        if self.checkpoint is not None:
            yield self.checkpoint
            return
        found = resolve_model(
            config.model,
            sources=manager.model_sources(),
            store=ModelStore(config.store_root),
            offline=config.offline,
            progress=progress,
            say=say,
        )
        checkpoint = open_checkpoint(found.path, manager)
        try:
            yield checkpoint
        finally:
            checkpoint.close()

    def tokenizer(
        self,
        config: EngineConfig,
        manager: PluginManager,
        progress: Progress,
        say: Callable[[str], None] = lambda line: None,
    ) -> Tokenizer:
        """The tokenizer alone: no weight is read. Raises as `load_model` does."""
        if self.vocab is not None:
            return RandomTokenizer(self.vocab)
        with self.opened(config, manager, progress, say) as checkpoint:
            return choose_tokenizer(checkpoint, manager)

    def prompt(self, tokenizer: Tokenizer, length: int, *, seed: int = 0) -> np.ndarray:
        """int32 [`length`]: the built-in text, or, for random weights, ids that `seed` chooses."""
        if self.vocab is not None:
            return random_prompt(self.vocab, length, seed=seed)
        return built_in_prompt(tokenizer, length)

    def _place(self) -> dict[str, Any]:
        if self.checkpoint is None:
            return {}
        return {"checkpoint": self.checkpoint, "tokenizer": RandomTokenizer(self.checkpoint.config["vocab_size"])}


def chosen_model(
    config: EngineConfig, manager: PluginManager, *, random_weights: str | None, weights_seed: int = 0
) -> ChosenModel:
    """`random_weights` is a name of SHAPES, None for the model of `config`. UsageError for another name, and where a
    model was named beside it. Reads nothing."""
    if random_weights is None:
        return ChosenModel(config.model)
    if random_weights not in SHAPES:
        raise UsageError(
            f"--random-weights {random_weights}: there is no such shape", hint=f"there are {', '.join(SHAPES)}"
        )
    if config.origins["model"] == "flag":
        raise UsageError(
            f"--random-weights {random_weights} and the model {config.model} exclude each other",
            hint="leave one of them out",
        )
    shape = SHAPES[random_weights]
    family = manager.families().load(manager.family_for("hf", shape["model_type"]).name)()
    made = random_checkpoint(family, {**shape, "weights_seed": weights_seed}, seed=weights_seed)
    name = f"random:{random_weights}"
    return ChosenModel(name, attrs.evolve(made, path=Path(name)))
