"""Whether JAX could run here, on an NVIDIA GPU or on the CPU, found without importing JAX and without starting CUDA."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from mlxcel.core.backend import Probe
from mlxcel_jax_cuda.driver import LIBRARY, cuda_version, gpus, has_driver

CUDA_PLUGINS: Final = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_CUDA: Final = "pip install 'mlxcel[cuda13]' or 'mlxcel[cuda12]'"
_CPU: Final = "pip install 'mlxcel[jax]'"


def probe(device: str) -> Probe:
    """Of a GPU, unless the CPU is asked for. There JAX runs only where it is named: `reference-numpy` is the choice of
    a machine without a GPU."""
    cpu, there = device == "cpu", gpus()
    lacking = missing(device)
    if lacking:
        return Probe(available=False, reason=f"it needs {' and '.join(lacking)}", devices=() if cpu else there)
    if cpu:
        idle = f"; {', '.join(there)} is not used" if there else ""
        return Probe(available=True, reason=f"{_jax()} on XLA:CPU{idle}", devices=("cpu",), by_name_only=True)
    plugin = next(name for name in CUDA_PLUGINS if find_spec(name))
    reason = f"{_jax()} with {plugin} on {there[0]}, whose driver serves CUDA {cuda_version()}"
    return Probe(available=True, reason=reason, devices=there)


def missing(device: str) -> list[str]:
    """What JAX needs for this device and does not find; packages with what installs them."""
    packages = [name for name in ("jax", "flax") if find_spec(name) is None]
    if device != "cpu" and find_spec("jax") is not None and not any(find_spec(name) for name in CUDA_PLUGINS):
        packages.append("the CUDA plugin of jax")
    lacking = [f"{' and '.join(packages)} ({_CPU if device == 'cpu' else _CUDA})"] if packages else []
    if device == "cpu":
        return lacking
    if not has_driver():
        lacking.append(f"an NVIDIA driver ({LIBRARY})")
    if not gpus():
        lacking.append("an NVIDIA GPU")
    return lacking


def _jax() -> str:
    try:
        return f"JAX {version('jax')}"
    except PackageNotFoundError:  # on the path, and not installed
        return "JAX"
