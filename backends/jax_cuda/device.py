"""Which device runs, what it is, and which type it computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import jax

from mlxcel.core.backend import DeviceMemory
from mlxcel.errors import CapacityError, DeviceError, UsageError
from mlxcel_jax_cuda import driver

DTYPES: Final = ("float32", "bfloat16")


@attrs.frozen
class DeviceFacts:
    """`name` is for people. Zeros and "" where a device has none of it: a CPU."""

    platform: str  # "cpu", "cuda"
    name: str
    capability: str  # CUDA's compute capability: "9.0" is Hopper
    sms: int  # streaming multiprocessors


def choose_device(asked: str) -> jax.Device:
    """ "auto" and "cuda" are the first GPU, "cuda:1" the second of those that this process sees, "cpu" is XLA:CPU.
    DeviceError, with what there is, for anything else."""
    platform, _, number = asked.partition(":")
    platform = "cuda" if platform == "auto" else platform
    try:
        there = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise DeviceError(
            f"JAX has no device {asked} here: {first_line(error)}",
            hint="`mlxcel doctor` shows what it finds; `--device cpu` runs on the CPU",
        ) from error
    if int(number or 0) >= len(there):
        known = ", ".join(f"{platform}:{place} ({device.device_kind})" for place, device in enumerate(there))
        raise DeviceError(f"there is no device {asked}", hint=f"there are {known}")
    return there[int(number or 0)]


@contextmanager
def enough_memory(device: jax.Device, what: str) -> Iterator[None]:
    """Around what takes memory on the device: CapacityError with the numbers where there is too little."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        counters = device.memory_stats() or {}
        raise CapacityError(
            f"{device.device_kind} has no memory left for {what}: {counters.get('bytes_in_use', 0)} bytes are in use, "
            f"{counters.get('bytes_limit', 0)} are the limit of this process",
            hint="say a smaller --kv-cache-budget, --prefill-chunk or --parallel, or a larger --gpu-memory-utilization",
        ) from error


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def device_facts(device: jax.Device) -> DeviceFacts:
    if device.platform == "cpu":
        return DeviceFacts("cpu", "XLA:CPU", "", 0)
    return DeviceFacts("cuda", device.device_kind, str(device.compute_capability), int(device.core_count))


def compute_dtype(asked: str, platform: str) -> str:
    """ "auto" is float32 on a CPU, where it is the fast one, and bfloat16 on a GPU. UsageError for any other type."""
    if asked == "auto":
        return "float32" if platform == "cpu" else "bfloat16"
    if asked not in DTYPES:
        raise UsageError(
            f"backend jax-cuda computes in {' or '.join(DTYPES)}, not in {asked}", hint="leave --dtype out"
        )
    return asked


def device_memory(device: jax.Device) -> DeviceMemory | None:
    """What the device has, and what this process may still take of it: as far as JAX's own limit goes, and no further
    than what other processes leave. None for a CPU, whose memory is the host's."""
    counters = device.memory_stats() if device.platform != "cpu" else None
    if not counters:
        return None
    in_use, limit = counters["bytes_in_use"], counters["bytes_limit"]
    found = driver.device_memory(device.local_hardware_id or 0)
    if found is None:
        return DeviceMemory(limit, limit - in_use)
    pooled = counters.get("pool_bytes", in_use)  # taken from the driver, whether in use or not
    return DeviceMemory(found.total, min(limit, found.free + pooled) - in_use)
