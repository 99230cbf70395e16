"""What JAX has to be told before it starts: platform, share of memory, how much it says, where it keeps programs."""

from __future__ import annotations

import logging
import sys
from typing import Final

from mlxcel.config import set_variables
from mlxcel.core.backend import BackendSettings
from mlxcel.errors import DeviceError

log = logging.getLogger("mlxcel.jax")

SHARE: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_OTHER_SHARE: Final = "XLA_CLIENT_MEM_FRACTION"  # of the same meaning: JAX refuses both together
_AT_ONCE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
_PLATFORMS: Final = "JAX_PLATFORMS"
_QUIET: Final = {"TF_CPP_MIN_LOG_LEVEL": "2"}
"""Errors alone: XLA's warnings are about the machine, at every start."""


def prepare(settings: BackendSettings) -> None:
    """Set the variables that JAX and XLA read, import JAX, and set the rest.

    Where JAX was imported before, what its configuration still takes is set there. Where it has started its devices,
    their platform cannot be changed any more: DeviceError if the one asked for is not among them. Nor can the share of
    the memory, which is told then: what JAX may take in fact is what models are planned for.
    """
    platforms = ("cpu",) if settings.device == "cpu" else ("cuda", "cpu")
    before = set_variables(_variables(settings, platforms), unless_set=_QUIET)
    imported = "jax" in sys.modules
    import jax
    from jax._src.xla_bridge import backends_are_initialized

    from mlxcel_jax_cuda.compile_cache import use_cache

    if imported and backends_are_initialized():
        _require_started(platforms[0], settings, before)
    else:
        jax.config.update("jax_platforms", ",".join(platforms))  # type: ignore[no-untyped-call]
    use_cache(settings.cache_folder)


def _variables(settings: BackendSettings, platforms: tuple[str, ...]) -> dict[str, str | None]:
    """None removes one. Platforms that are listed are no suggestion: JAX fails where the first of them does."""
    values: dict[str, str | None] = {_PLATFORMS: ",".join(platforms)}
    if platforms[0] == "cpu":
        return values
    if settings.memory_share is None:
        return {**values, _AT_ONCE: "false"}
    return {**values, SHARE: f"{settings.memory_share:.6f}", _OTHER_SHARE: None}


def _require_started(platform: str, settings: BackendSettings, before: dict[str, str | None]) -> None:
    from jax.extend.backend import backends

    started = backends()
    if platform not in started:
        raise DeviceError(
            f"JAX runs in this process already, on {', '.join(sorted(started))} alone: {platform} cannot be added",
            hint="start a process of its own, or load the model for the GPU before anything uses JAX",
        )
    share = _variables(settings, (platform,)).get(SHARE)
    if share is not None and before.get(SHARE) != share:
        log.warning(
            "JAX was started before with %s: --gpu-memory-utilization %s acts on plans only, and cannot raise that",
            f"{SHARE}={before[SHARE]}" if before.get(SHARE) else "a share of its own",
            share,
        )
