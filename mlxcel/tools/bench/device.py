"""The device under a backend: how fast it copies, and the most memory that was in use.

A platform of its own memory is asked through JAX, which drives it; a CPU's memory is the host's.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mlxcel.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

GPU_BYTES: Final = 1 << 30
CPU_BYTES: Final = 256 << 20
"""Size of the array that is copied."""
BEST_OF: Final = 10
TURNS: Final = 8
"""Copies of one call on a GPU: its start is none of the memory's time."""


def copying(platform: str, device: str) -> Callable[[], float]:
    """Measures when it is called: 10^9 bytes a second, read and written together, the best of BEST_OF behind one to
    warm up. It holds no memory between its calls, and what it compiled. `device` is the option of that name.
    CapacityError where there is no room for two such arrays."""
    prepared = _on_gpu(device) if platform == "cuda" else _on_host

    def copy() -> float:
        once, moved = prepared()
        once()
        return moved / min(_seconds(once) for _ in range(BEST_OF)) / 1e9

    return copy


def peak_bytes(platform: str, device: str) -> int:
    """The most that this process has had in use: of the device's memory, on a CPU of the host's."""
    if platform == "cuda":
        return int((_gpu(device).memory_stats() or {}).get("peak_bytes_in_use", 0))
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _seconds(once: Callable[[], Any]) -> float:
    began = time.perf_counter()
    once()
    return time.perf_counter() - began


def _on_host() -> tuple[Callable[[], Any], int]:
    source = np.ones(CPU_BYTES, np.uint8)
    target = np.empty_like(source)
    return lambda: np.copyto(target, source), 2 * CPU_BYTES


def _on_gpu(device: str) -> Callable[[], tuple[Callable[[], Any], int]]:
    import jax
    import jax.numpy as jnp

    gpu = _gpu(device)

    @jax.jit
    def copies(x: jax.Array) -> jax.Array:
        """Elementwise, so that it is kernels and no copy engine that move the bytes."""
        copied: jax.Array = jax.lax.fori_loop(0, TURNS, lambda _, y: y * 0.5, x)
        return copied

    def prepared() -> tuple[Callable[[], Any], int]:
        try:
            with jax.default_device(gpu):
                values = jax.block_until_ready(jnp.ones(GPU_BYTES // 4, jnp.float32))  # type: ignore[no-untyped-call]
                jax.block_until_ready(copies(values))  # type: ignore[no-untyped-call]
        except jax.errors.JaxRuntimeError as error:
            raise CapacityError(
                f"the device has no room to copy {GPU_BYTES} bytes",
                hint="--no-copy-bandwidth leaves the copy out; see what else runs on the device",
            ) from error
        return lambda: jax.block_until_ready(copies(values)), 2 * TURNS * GPU_BYTES  # type: ignore[no-untyped-call]

    return prepared


def _gpu(device: str) -> Any:
    import jax

    return jax.local_devices(backend="cuda")[int(device.partition(":")[2] or 0)]
