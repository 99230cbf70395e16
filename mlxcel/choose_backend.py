"""Which backend runs: the one that is named, else the available one of highest priority. Nothing falls back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from mlxcel.core.backend import Backend, BackendSettings, BackendSpec, Probe, WatchesNumerics
from mlxcel.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from mlxcel.config import EngineConfig
    from mlxcel.plugins.manager import PluginManager
    from mlxcel.plugins.registry import Registry

log = logging.getLogger("mlxcel.load")

_GPU_HINT = (
    "on NVIDIA GPUs `pip install 'mlxcel[cuda13]'` (or cuda12) brings what is needed; `mlxcel doctor` shows more"
)


@attrs.frozen
class Chosen:
    """A backend without a model yet, and why it is this one."""

    name: str
    backend: Backend
    why: str

    @property
    def line(self) -> str:
        """The line at the start: what runs, why, and on what."""
        caps = self.backend.caps
        return f"backend: {self.name} ({self.why}), on {caps.platform}: {caps.device}, {caps.dtype}"


def choose_backend(config: EngineConfig, manager: PluginManager) -> Chosen:
    """UsageError lists the known names; DeviceError says why one that is named, or a named device, is not there."""
    registry = manager.backends()
    if config.backend is not None:
        spec = registry.choose(config.backend)
        probe = probed(spec, config.device)
        if not probe.available:
            ways = [*([probe.hint] if probe.hint else []), _other_way(spec, config.device)]
            raise DeviceError(f"the backend {spec.name} cannot run here: {probe.reason}", hint="; or ".join(ways))
        return Chosen(spec.name, _made(registry, spec.name, config), f"{_asked(config)}: {probe.reason}")
    refused: list[str] = []
    for spec in sorted(registry.values(), key=lambda spec: -spec.priority):
        probe = probed(spec, config.device)
        if probe.available and not probe.by_name_only:
            try:
                backend = _made(registry, spec.name, config)
            except DeviceError as error:
                if config.device == "auto":
                    raise
                refused.append(f"{spec.name}: {error.message}")
                log.warning("not %s", refused[-1])
                continue
            return Chosen(spec.name, backend, "the best one available")
        refused.append(f"{spec.name}: {'only where it is named' if probe.available else probe.reason}")
        if probe.devices and not probe.available:
            way = f" ({probe.hint})" if probe.hint else ""
            log.warning("%s cannot use %s: %s%s", spec.name, ", ".join(probe.devices), probe.reason, way)
        else:
            log.info("not %s", refused[-1])
    where = "" if config.device == "auto" else f" on the device {config.device}"
    raise DeviceError(f"no backend can run{where}: {'; '.join(refused) or 'none is installed'}", hint=_GPU_HINT)


def probed(spec: BackendSpec, device: str) -> Probe:
    """The backend's probe; one that raises means not available."""
    try:
        return spec.probe(device)
    except Exception as error:
        return Probe(available=False, reason=f"its probe failed: {type(error).__name__}: {error}")


def backend_cache(config: EngineConfig, name: str) -> Path | None:
    """The folder of a backend for what it keeps between runs. It need not exist."""
    return None if config.cache_root is None else config.cache_root / "backends" / name


def _made(registry: Registry[BackendSpec], name: str, config: EngineConfig) -> Backend:
    settings = BackendSettings(config.device, config.gpu_memory_utilization, backend_cache(config, name))
    backend = make_backend(registry, name, settings, dtype=config.dtype, deterministic=config.deterministic)
    if config.debug_numerics:
        if not isinstance(backend, WatchesNumerics):
            raise UsageError(
                f"the backend {name} cannot say in which layer numbers go wrong", hint="leave --debug-numerics out"
            )
        backend.watch_numerics()
    return backend


def make_backend(
    registry: Registry[BackendSpec], name: str, settings: BackendSettings, *, dtype: str, deterministic: bool
) -> Backend:
    """What has to be settled before its import first, then the backend. DeviceError and UsageError from either."""
    registry.choose(name).prepare(settings)
    made: Backend = registry.load(name)(device=settings.device, dtype=dtype, deterministic=deterministic)
    return made


def _other_way(spec: BackendSpec, device: str) -> str:
    if device != "cpu" and probed(spec, "cpu").available:
        return f"`--device cpu` runs {spec.name} on the CPU; without --backend the best one that can run is taken"
    return "leave --backend out: then the best one that can run is taken; `mlxcel doctor` shows each"


def _asked(config: EngineConfig) -> str:
    words = {"flag": "asked for by --backend", "environment": "asked for by MLXCEL_BACKEND"}
    return words.get(config.origins["backend"], "asked for by the configuration file")
