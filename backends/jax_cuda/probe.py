"""Whether JAX could run on an NVIDIA GPU here, found without importing JAX and without starting CUDA."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from mlxcel.core.backend import Probe
from mlxcel.errors import DeviceError

_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_DRIVER = "libcuda.so.1"
_GPUS = Path("/proc/driver/nvidia/gpus")
_INSTALL = "pip install 'mlxcel[cuda13]' or 'mlxcel[cuda12]'"
_NO_ENGINE = "this version of mlxcel has no engine for it yet"


def probe() -> Probe:
    """Not available: the engine side is not part of this version, so what the machine lacks comes second."""
    lacking = missing()
    reason = f"{_NO_ENGINE}; this machine would need {' and '.join(lacking)}" if lacking else _NO_ENGINE
    return Probe(available=False, reason=reason, devices=gpus())


def missing() -> list[str]:
    """What JAX would need on this machine and does not find, each with what installs it."""
    lacking = []
    if find_spec("jax") is None:
        lacking.append(f"jax ({_INSTALL})")
    elif not any(find_spec(name) for name in _CUDA_PLUGINS):
        lacking.append(f"the CUDA plugin of jax ({_INSTALL})")
    if not has_driver():
        lacking.append(f"an NVIDIA driver ({_DRIVER})")
    return lacking


def has_driver() -> bool:
    """Whether the driver's library can be opened. CUDA is not initialised: that would take time, and a context."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def gpus() -> tuple[str, ...]:
    """Names of the GPUs that the driver lists, () where it lists none or is not there."""
    try:
        files = sorted(_GPUS.glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines()]
    except OSError:
        return ()
    return tuple(line.partition(":")[2].strip() for line in lines if line.startswith("Model:"))


def refuse(**options: object) -> NoReturn:
    """What the backend's target gives in this version, whatever the options: DeviceError with the probe's reason."""
    raise DeviceError(
        f"the backend jax-cuda cannot run: {probe().reason}", hint="`--backend reference-numpy` runs on any CPU"
    )
