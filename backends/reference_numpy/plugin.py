"""Offers the NumPy backend."""

from __future__ import annotations

from mlxcel.core.backend import BackendSpec
from mlxcel.plugins.hookspecs import hookimpl


@hookimpl
def mlxcel_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            "reference-numpy",
            "the readable oracle, on any CPU",
            "mlxcel_reference_numpy.backend:NumpyBackend",
            priority=10,
            probe_target="mlxcel_reference_numpy.probe:probe",
        )
    ]
