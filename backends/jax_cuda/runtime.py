"""What JAX has to be told before it starts: platform, share of memory, how much it says, where it keeps programs."""

from __future__ import annotations

import logging
import sys
from typing import Final

from mlxcel.config import set_variables
from mlxcel.core.backend import BackendSettings
from mlxcel.errors import DeviceError
from mlxcel_jax_cuda import driver

log = logging.getLogger("mlxcel.jax")

SHARE: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_OTHER_SHARE: Final = "XLA_CLIENT_MEM_FRACTION"  # of the same meaning: JAX refuses both together
_AT_ONCE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
_PLATFORMS: Final = "JAX_PLATFORMS"
_QUIET: Final = {"TF_CPP_MIN_LOG_LEVEL": "2"}
"""Errors alone: XLA's warnings are about the machine, at every start."""
_OF_THE_FREE: Final = 0.98
"""Of what other programs leave: loaded programs and libraries take memory beside JAX's own."""


def prepare(settings: BackendSettings) -> None:
    """Set the variables that JAX and XLA read, import JAX, and set the rest.

    Where JAX was imported before, what its configuration still takes is set there. Where it has started its devices,
    their platform cannot be changed any more: DeviceError if the one asked for is not among them. Nor can the share of
    the memory, which is told then: what JAX may take in fact is what models are planned for.
    """
    platforms = ("cpu",) if settings.device == "cpu" else ("cuda", "cpu")
    if has_started():
        _require_started(platforms[0], settings)
    else:
        set_variables(_variables(settings, platforms), unless_set=_QUIET)
        import jax

        jax.config.update("jax_platforms", ",".join(platforms))  # type: ignore[no-untyped-call]
    from mlxcel_jax_cuda.compile_cache import use_cache

    use_cache(settings.cache_folder)


def has_started() -> bool:
    """Whether JAX has asked for its devices in this process. It is not imported for the question."""
    if "jax" not in sys.modules:
        return False
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


def _variables(settings: BackendSettings, platforms: tuple[str, ...]) -> dict[str, str | None]:
    """None removes one. Platforms that are listed are no suggestion: JAX fails where the first of them does."""
    values: dict[str, str | None] = {_PLATFORMS: ",".join(platforms)}
    if platforms[0] == "cpu":
        return values
    if settings.memory_share is None:
        return {**values, _AT_ONCE: "false"}
    return {**values, SHARE: f"{_share_there(settings.device, settings.memory_share):.6f}", _OTHER_SHARE: None}


def _share_there(device: str, asked: float) -> float:
    """What is asked for, or what other programs leave: JAX would go down from the one to the other in steps of a tenth,
    and complain at each."""
    memory = driver.device_memory(int(device.partition(":")[2] or 0))
    return asked if memory is None else min(asked, _OF_THE_FREE * memory.free / memory.total)


def _require_started(platform: str, settings: BackendSettings) -> None:
    from jax.extend.backend import backends

    from mlxcel_jax_cuda.device import choose_device, device_memory

    started = backends()
    if platform not in started:
        raise DeviceError(
            f"JAX runs in this process already, on {', '.join(sorted(started))} alone: {platform} cannot be added",
            hint="start a process of its own, or load the model for the GPU before anything uses JAX",
        )
    device = choose_device(settings.device)
    memory = device_memory(device)
    if memory is None or settings.memory_share is None:
        return
    asked, limit = int(settings.memory_share * memory.total), device.memory_stats()["bytes_limit"]
    if limit < asked:
        log.warning(
            "JAX was started before with %d bytes of the device as its limit: --gpu-memory-utilization %g, which is "
            "%d bytes, cannot raise that",
            limit, settings.memory_share, asked,
        )  # fmt: skip
