"""NVIDIA's driver, asked through its own library: no CUDA program is started, and jax is not needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from mlxcel.core.backend import DeviceMemory

LIBRARY: Final = "libcuda.so.1"
_LISTED: Final = Path("/proc/driver/nvidia/gpus")
_VERSION: Final = Path("/proc/driver/nvidia/version")
_NODES: Final = Path("/dev")


def has_driver() -> bool:
    """Whether the driver's library can be opened. CUDA is not initialised: that would take time, and a context."""
    return _library() is not None


def cuda_version() -> str | None:
    """The newest CUDA that the driver serves, such as "13.0"; None without a driver."""
    library, number = _library(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def driver_version() -> str:
    """Its own, in the driver's words; "" without one."""
    try:
        return _VERSION.read_text().partition("\n")[0]
    except OSError:
        return ""


def gpus() -> tuple[str, ...]:
    """Names of the GPUs that the driver lists; "an NVIDIA GPU" where there is a device that it does not name."""
    try:
        files = sorted(_LISTED.glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines()]
    except OSError:
        lines = []
    names = tuple(line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))
    return names or (("an NVIDIA GPU",) if _has_node() else ())


def _has_node() -> bool:
    """A container may show the device alone; a Linux under Windows (WSL2) has one of its own."""
    return any(_NODES.glob("nvidia[0-9]*")) or (_NODES / "dxg").exists()


def device_memory(ordinal: int) -> DeviceMemory | None:
    """Of the GPU with this number among those that this process sees; None where the driver does not say. What any
    process has taken is not free, this one's own included."""
    library, device = _library(), ctypes.c_int()
    if library is None or library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    with _context(library, device) as current:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if not current or library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
            return None
        return DeviceMemory(total.value, free.value)


@contextmanager
def _context(library: Any, device: ctypes.c_int) -> Iterator[bool]:
    """The device's primary context, which is JAX's too, as the current one of this thread; False: there is none."""
    context, old = ctypes.c_void_p(), ctypes.c_void_p()
    if library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        yield False
        return
    try:
        pushed = not library.cuCtxPushCurrent_v2(context)
        yield pushed
        if pushed:
            library.cuCtxPopCurrent_v2(ctypes.byref(old))
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)


def _library() -> Any:
    """None where there is none. Calls of it give 0 when they succeed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None
