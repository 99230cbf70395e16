"""What llama.cpp's route reads of a body, besides the sampling fields that all routes share
(docs/spec/clients.md 3.3)."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta

from mlxcel.errors import RequestError, UnsupportedField, shown
from mlxcel.server.fields import Asking

_ID: Final = {"type": "integer", "minimum": 0}
_MIXED: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, _ID]}}]}

NativePrompt = Annotated[
    Any,
    Meta(
        description="A text, token ids, both mixed in a list, or a list of these.",
        extra_json_schema={"anyOf": [*_MIXED["anyOf"], {"type": "array", "items": _MIXED, "minItems": 1}]},
    ),
]
Count = Annotated[int, Meta(ge=0)]
Path = Annotated[str, Meta(min_length=1, max_length=256)]


class Native(Asking, kw_only=True):
    """POST /completion"""

    prompt: NativePrompt
    id_slot: Annotated[int, Meta(ge=-1, description="A hint: rows are taken as they are free.")] = -1
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    response_fields: Annotated[list[Path], Meta(max_length=64, description='"a/b" lifts `b` out of `a`.')] = []  # noqa: RUF012
    n_keep: Annotated[int, Meta(ge=-1)] = 0
    n_discard: Count = 0
    n_cache_reuse: Count = 0
    lora: Annotated[Any, Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})] = None


IDLE: Final = {
    "n_keep": "a context that is full ends the reply, nothing is moved out of it",
    "n_discard": "a context that is full ends the reply, nothing is moved out of it",
    "n_cache_reuse": "a cached prompt is reused from its beginning",
}
"""Fields that cannot act, and why."""


def check_native(body: Native, *, rows: int, strict: bool) -> list[str]:
    """Warnings for fields that cannot act, which `strict` refuses: RequestError. So is a row that there is not, of
    `rows`, and UnsupportedField is raised for adapters that would act."""
    warnings = []
    for name, reason in IDLE.items():
        if getattr(body, name):
            warnings.append(f"{name} has no effect: {reason}")
            if strict:
                raise RequestError(warnings[0], field=name, hint="leave it out, or ask without --strict")
    _check_adapters(body.lora)
    if body.id_slot >= rows:
        raise RequestError(
            f"id_slot is {shown(body.id_slot)}, it must be from 0 to {rows - 1}, or -1 for any", field="id_slot"
        )
    return warnings


def _check_adapters(lora: Any) -> None:
    if lora is None:
        return
    if not isinstance(lora, list):
        raise RequestError(f"lora is {shown(lora)}, a list of {{id, scale}} is needed", field="lora")
    for place, adapter in enumerate(lora):
        scale = adapter.get("scale") if isinstance(adapter, dict) else None
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            field = f"lora[{place}]"
            raise RequestError(f"{field} is {shown(adapter)}, it must be {{id, scale}}", field=field)
        if scale:
            raise UnsupportedField(
                f"lora[{place}].scale is {shown(scale)}: there are no adapters in this version",
                field=f"lora[{place}].scale",
                hint="leave lora out",
            )
