"""mlxcel: a plugin-based LLM inference framework. Names are imported when they are first used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxcel.async_llm import AsyncLLM
    from mlxcel.core.engine import Engine
    from mlxcel.core.params import SamplingParams
    from mlxcel.llm import LLM
    from mlxcel.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
    from mlxcel.plugins.hookspecs import hookimpl

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Engine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "__version__",
    "hookimpl",
]

_PLACES = {
    "LLM": "mlxcel.llm",
    "AsyncLLM": "mlxcel.async_llm",
    "CompletionOutput": "mlxcel.outputs",
    "Engine": "mlxcel.core.engine",
    "Logprob": "mlxcel.outputs",
    "RequestOutput": "mlxcel.outputs",
    "SamplingParams": "mlxcel.core.params",
    "StreamDelta": "mlxcel.outputs",
    "hookimpl": "mlxcel.plugins.hookspecs",
}

logging.getLogger("mlxcel").addHandler(logging.NullHandler())


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
