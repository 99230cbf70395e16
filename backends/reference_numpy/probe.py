"""NumPy is a base requirement: this backend runs wherever mlxcel does."""

from __future__ import annotations

from importlib.metadata import version

from mlxcel.core.backend import Probe


def probe() -> Probe:
    """Always available. NumPy's version is read, NumPy is not imported."""
    return Probe(available=True, reason=f"NumPy {version('numpy')}", devices=("cpu",))
