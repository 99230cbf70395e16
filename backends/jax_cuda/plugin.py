"""Offers the JAX backend for NVIDIA GPUs."""

from __future__ import annotations

from mlxcel.core.backend import BackendSpec
from mlxcel.plugins.hookspecs import hookimpl


@hookimpl
def mlxcel_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            "jax-cuda",
            "JAX on NVIDIA GPUs",
            "mlxcel_jax_cuda.probe:refuse",
            priority=100,
            probe_target="mlxcel_jax_cuda.probe:probe",
        )
    ]
