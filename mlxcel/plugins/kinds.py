"""The kinds of things that hooks register, and what an item of each must look like."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs

from mlxcel.core.backend import BackendSpec
from mlxcel.core.checkpoint import FormatSpec
from mlxcel.core.family import FamilySpec
from mlxcel.core.named import Named
from mlxcel.core.source import ModelSource
from mlxcel.core.tokenizer import TokenizerSpec

_NAME = re.compile(r"[^\s-]\S*")  # an option's value: no blank, and it does not look like an option
_TARGET = re.compile(r"\w+(\.\w+)*:\w+")


@attrs.frozen
class Kind:
    """`word` is what messages call one item; `item` the class of a spec, None for objects, which have `methods`. A hook
    with `arguments` is not called until somebody has them."""

    hook: str
    word: str
    item: type[Any] | None
    methods: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def fault(self, item: Any) -> str | None:
        """What is wrong with an item that a plugin's hook returned, or None."""
        if self.item is None:
            lacking = [
                name for name in self.methods if isinstance(item, type) or not callable(getattr(item, name, None))
            ]
            return f"{item!r} is no {self.word} object: {' and '.join(lacking)} cannot be called" if lacking else None
        if not isinstance(item, self.item):
            return f"{item!r} is no {self.item.__name__}"
        return next(_faults(item), None)


BACKENDS = Kind("mlxcel_backends", "backend", BackendSpec)
FAMILIES = Kind("mlxcel_families", "model family", FamilySpec)
FORMATS = Kind("mlxcel_formats", "checkpoint format", FormatSpec)
TOKENIZERS = Kind("mlxcel_tokenizers", "tokenizer", TokenizerSpec)
MODEL_SOURCES = Kind("mlxcel_model_sources", "model source", ModelSource)
KV_STORES = Kind("mlxcel_kv_stores", "KV store", Named)
PREFILL_PLANNERS = Kind("mlxcel_prefill_planners", "prefill planner", Named)
SAMPLERS = Kind("mlxcel_samplers", "sampler", Named)
LOGITS_PROCESSORS = Kind("mlxcel_logits_processors", "logits processor", Named)
FINISH_STEPS = Kind("mlxcel_finish_steps", "finish step", Named)
OBSERVERS = Kind("mlxcel_observers", "observer", None, methods=("step_finished", "request_finished"))
ROUTES = Kind("mlxcel_routes", "route", None, methods=("matches", "handle"), arguments=("engine",))

KINDS = (
    BACKENDS,
    FAMILIES,
    FORMATS,
    TOKENIZERS,
    MODEL_SOURCES,
    KV_STORES,
    PREFILL_PLANNERS,
    SAMPLERS,
    LOGITS_PROCESSORS,
    FINISH_STEPS,
    OBSERVERS,
    ROUTES,
)


def _faults(spec: Any) -> Iterator[str]:
    """attrs does not look at the types of what it is given, and a mistake here would show far from its plugin."""
    if not (isinstance(spec.name, str) and _NAME.fullmatch(spec.name)):
        yield f"the name {spec.name!r} must be a text without blanks that does not begin with '-'"
    for field in ("target", "probe_target", "detect", "fetch"):
        value = getattr(spec, field, "a:a")
        if not (isinstance(value, str) and _TARGET.fullmatch(value)):
            yield f"{spec.name}: {field} must be a text 'package.module:Name', not {value!r}"
    prepare = getattr(spec, "prepare_target", None)
    if prepare is not None and not (isinstance(prepare, str) and _TARGET.fullmatch(prepare)):
        yield f"{spec.name}: prepare_target must be a text 'package.module:name' or None, not {prepare!r}"
    for field in ("model_types", "gguf_archs"):
        value = getattr(spec, field, ())
        if not (isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)):
            yield f"{spec.name}: {field} must be a tuple of texts, not {value!r}"
    priority = getattr(spec, "priority", 0)
    if type(priority) is not int:
        yield f"{spec.name}: priority must be an int, not {priority!r}"
