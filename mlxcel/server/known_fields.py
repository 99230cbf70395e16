"""Fields of other programs' requests that have no effect here, and those that would change the answer
(docs/spec/clients.md 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxcel.core.request_names import REFUSED
from mlxcel.errors import RequestError, UnsupportedField, shown

IDLE: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
    }
)
"""Accepted with any value."""

MATTERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Of IDLE, those whose value may ask for something, with the values that ask for nothing: `--strict` refuses others."""

_TOOLS: Final = "tools are not in this version"
_MODALITIES: Final = "text is all that is read and written"
_ELSEWHERE: Final = "nothing runs here but the model"

UNSUPPORTED: Final[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "audio": (_MODALITIES, ()),
    "modalities": (_MODALITIES, (["text"],)),
    "functions": (_TOOLS, ([],)),
    "function_call": (_TOOLS, ("none", "auto")),
    "tools": (_TOOLS, ([],)),
    "tool_choice": (_TOOLS, ("none", "auto", {"type": "none"}, {"type": "auto"})),
    "web_search_options": ("nothing is looked up", ()),
    "prediction": ("the reply is not guessed ahead", ()),
    "container": (_ELSEWHERE, ()),
    "mcp_servers": (_ELSEWHERE, ([],)),
    "context_management": ("a conversation is read as it is", ()),
    "output_config": ("the reply is what the model makes of the prompt", ({},)),
    "output_format": ("structured output is not in this version", ()),
    "image_data": (_MODALITIES, ([],)),
}
"""Why, and the values that ask for nothing. Those of sampling are in `request_names.REFUSED`."""

KNOWN: Final = IDLE | UNSUPPORTED.keys() | REFUSED.keys()
"""What a route need not name to know."""


def check_known(name: str, value: Any, *, strict: bool) -> None:
    """Of one of IDLE and UNSUPPORTED: UnsupportedField, or with `strict` RequestError, where its value asks for what
    there is not."""
    if value is None:
        return
    if name in UNSUPPORTED:
        reason, idle = UNSUPPORTED[name]
        if not any(type(value) is type(other) and value == other for other in idle):
            raise UnsupportedField(f"{name} is not supported: {reason}", field=name, hint="leave it out")
    elif strict and name in MATTERS and not any(value is other or value == other for other in MATTERS[name]):
        raise RequestError(
            f"{name} is {shown(value)}, which has no effect here",
            field=name,
            hint="leave it out, or ask without --strict",
        )
