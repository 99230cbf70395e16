"""Whether JAX could run here, on an NVIDIA GPU or on the CPU, found without importing JAX and without starting CUDA."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from mlxcel.core.backend import Probe
from mlxcel_jax_cuda.driver import LIBRARY, cuda_version, gpus, has_driver

CUDA_PLUGINS: Final = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_CUDA: Final = "on NVIDIA GPUs: pip install 'mlxcel[cuda13]', or 'mlxcel[cuda12]' for an older driver"
_CPU: Final = "pip install 'mlxcel[jax]'"


def probe(device: str) -> Probe:
    """Of a GPU, unless the CPU is asked for. There JAX runs only where it is named: `reference-numpy` is the choice of
    a machine without a GPU."""
    cpu, there = device == "cpu", gpus()
    packages = _lacking_packages(device)
    lacking = packages if cpu else [*packages, *_lacking_hardware(there)]
    if lacking:
        hint = (_CPU if cpu else _CUDA) if packages else None
        return Probe(available=False, reason=f"it needs {_listed(lacking)}", devices=() if cpu else there, hint=hint)
    if cpu:
        idle = f"; {', '.join(there)} is not used" if there else ""
        return Probe(available=True, reason=f"{_jax()} on XLA:CPU{idle}", devices=("cpu",), by_name_only=True)
    plugin = next(name for name in CUDA_PLUGINS if find_spec(name))
    reason = f"{_jax()} with {plugin} on {there[0]}, whose driver serves CUDA {cuda_version()}"
    return Probe(available=True, reason=reason, devices=there)


def _lacking_packages(device: str) -> list[str]:
    lacking = [name for name in ("jax", "flax") if find_spec(name) is None]
    if device != "cpu" and find_spec("jax") is not None and not any(find_spec(name) for name in CUDA_PLUGINS):
        lacking.append("the CUDA plugin of jax")
    return lacking


def _lacking_hardware(there: tuple[str, ...]) -> list[str]:
    driver = [] if has_driver() else [f"an NVIDIA driver ({LIBRARY})"]
    return driver if there else [*driver, "an NVIDIA GPU"]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[:-1] else names)


def _jax() -> str:
    try:
        return f"JAX {version('jax')}"
    except PackageNotFoundError:  # on the path, and not installed
        return "JAX"
