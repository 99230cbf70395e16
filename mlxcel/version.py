"""Which mlxcel this is."""

from __future__ import annotations

from importlib import import_module, metadata


def version() -> str:
    """Of the installed distribution, or "unknown"."""
    try:
        return metadata.version("mlxcel")
    except metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """The commit that this distribution was built from (setup.py stamps it), or "unknown", as in a checkout."""
    try:
        stamp = import_module("mlxcel._build")
    except ModuleNotFoundError:
        return "unknown"
    return str(stamp.COMMIT)
