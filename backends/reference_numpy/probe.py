"""NumPy is a base requirement: this backend runs wherever mlxcel does."""

from __future__ import annotations

from importlib.metadata import version

from mlxcel.core.backend import Probe


def probe(device: str) -> Probe:
    """Available on the CPU. NumPy's version is read, NumPy is not imported."""
    if device not in ("auto", "cpu"):
        return Probe(available=False, reason=f"it runs on the CPU, not on {device}")
    return Probe(available=True, reason=f"NumPy {version('numpy')}", devices=("cpu",))
