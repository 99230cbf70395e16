"""What all arms have in common, and what is told of the engine of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np

from mlxcel.kept_weights import KeptWeights
from mlxcel.load import LoadedModel
from mlxcel.tools.model_choice import ChosenModel
from mlxcel.tools.parity.options import ParityOptions

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager


@attrs.frozen(eq=False)
class Setup:
    """What all arms have in common: the model, its configuration, the prompt int32 [P], and who is told. `kept` are the
    weights of those that run on one backend."""

    model: ChosenModel
    config: EngineConfig
    manager: PluginManager
    progress: Progress
    say: Callable[[str], None]
    options: ParityOptions
    prompt: np.ndarray
    kept: KeptWeights = attrs.field(factory=KeptWeights)


@attrs.frozen
class EngineFacts:
    """Of an engine as it was opened."""

    model: str
    backend: str
    device: str
    dtype: str
    level: str
    quantisation: str

    @classmethod
    def of(cls, model: LoadedModel) -> EngineFacts:
        return cls(
            model=model.facts.name,
            backend=model.backend,
            device=model.caps.device,
            dtype=model.caps.dtype,
            level=model.engine.level,
            quantisation=model.facts.quantisation,
        )
