"""mlxcel: a plugin-based LLM inference framework. Names are imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxcel.core.engine import Engine
    from mlxcel.core.params import SamplingParams
    from mlxcel.plugins.hookspecs import hookimpl

    __version__: str

__all__ = ["Engine", "SamplingParams", "__version__", "hookimpl"]

_PLACES = {
    "Engine": "mlxcel.core.engine",
    "SamplingParams": "mlxcel.core.params",
    "hookimpl": "mlxcel.plugins.hookspecs",
}


def __getattr__(name: str) -> Any:
    """https://peps.python.org/pep-0562/"""
    if name == "__version__":
        from mlxcel.version import version

        return version()
    if name not in _PLACES:
        raise AttributeError(f"module 'mlxcel' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
