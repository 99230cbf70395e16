"""What an engine is made of."""

from __future__ import annotations

import attrs

from mlxcel.core.backend import Backend
from mlxcel.core.finish import Finish
from mlxcel.core.kv import KVSpec, KVStore
from mlxcel.core.sampling import Sampler
from mlxcel.core.settings import EngineSettings


@attrs.frozen(eq=False)
class EngineParts:
    """For the modules that work on it; nobody outside sees the backend of a live engine (spec E7)."""

    backend: Backend
    kv_spec: KVSpec
    kv: KVStore
    sampler: Sampler
    finish: Finish
    settings: EngineSettings
