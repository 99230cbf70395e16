"""Which backend runs: the one that is named, else the available one of highest priority. Nothing falls back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from mlxcel.core.backend import Backend, BackendSpec, Probe
from mlxcel.errors import DeviceError

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.plugins.manager import PluginManager
    from mlxcel.plugins.registry import Registry

_GPU_HINT = (
    "on NVIDIA GPUs `pip install 'mlxcel[cuda13]'` (or cuda12) brings what is needed; `mlxcel doctor` shows more"
)


@attrs.frozen
class Chosen:
    """A backend without a model yet, and why it is this one."""

    name: str
    backend: Backend
    why: str


def choose_backend(config: EngineConfig, manager: PluginManager) -> Chosen:
    """UsageError lists the known names; DeviceError says why one that is named, or a named device, is not there."""
    registry = manager.backends()
    if config.backend is not None:
        probe = probed(registry.choose(config.backend))
        if not probe.available:
            raise DeviceError(
                f"the backend {config.backend} cannot run here: {probe.reason}",
                hint="leave --backend out: then the best one that can run is taken; `mlxcel doctor` shows each",
            )
        return Chosen(config.backend, _made(registry, config.backend, config), f"{_asked(config)}: {probe.reason}")
    refused: list[str] = []
    for spec in sorted(registry.values(), key=lambda spec: -spec.priority):
        probe = probed(spec)
        if not probe.available:
            refused.append(f"{spec.name}: {probe.reason}")
            continue
        try:
            backend = _made(registry, spec.name, config)
        except DeviceError as error:
            if config.device == "auto":
                raise
            refused.append(f"{spec.name}: {error.message}")
            continue
        why = "the best one available"
        return Chosen(spec.name, backend, f"{why}; {'; '.join(refused)}" if refused else why)
    where = "" if config.device == "auto" else f" on the device {config.device}"
    raise DeviceError(f"no backend can run{where}: {'; '.join(refused) or 'none is installed'}", hint=_GPU_HINT)


def probed(spec: BackendSpec) -> Probe:
    """The backend's probe; one that raises means not available."""
    try:
        return spec.probe()
    except Exception as error:
        return Probe(available=False, reason=f"its probe failed: {type(error).__name__}: {error}")


def _made(registry: Registry[BackendSpec], name: str, config: EngineConfig) -> Backend:
    made: Backend = registry.load(name)(device=config.device, dtype=config.dtype, deterministic=config.deterministic)
    return made


def _asked(config: EngineConfig) -> str:
    words = {"flag": "asked for by --backend", "environment": "asked for by MLXCEL_BACKEND"}
    return words.get(config.origins["backend"], "asked for by the configuration file")
