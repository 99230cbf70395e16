"""Offers the JAX backend: on NVIDIA GPUs, and where it is named on the CPU."""

from __future__ import annotations

from mlxcel.core.backend import BackendSpec
from mlxcel.plugins.hookspecs import hookimpl


@hookimpl
def mlxcel_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            "jax-cuda",
            "JAX on NVIDIA GPUs; on the CPU with --device cpu",
            "mlxcel_jax_cuda.backend:JaxBackend",
            priority=100,
            probe_target="mlxcel_jax_cuda.probe:probe",
            prepare_target="mlxcel_jax_cuda.runtime:prepare",
        )
    ]
