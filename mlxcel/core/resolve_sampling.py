"""The one place where parameters that were not given become values (docs/spec/clients.md 0.1, spec E0b, S6 to S9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from mlxcel.core.inert import inert
from mlxcel.core.param_table import CLIENT_DEFAULTS, RULES
from mlxcel.core.params import SamplingParams
from mlxcel.errors import RequestError

NOT_SAID = frozenset({"default", "generation_config"})
"""Origins of values that nobody asked for: they are not warned about."""


@attrs.frozen
class Resolved:
    """Effective parameters, where each value came from, and accepted values that cannot act."""

    params: SamplingParams
    origin: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def resolve_sampling(
    client: str,
    *layers: tuple[str, Mapping[str, Any]],
    strict: bool = False,
    fresh_seed: Callable[[], int],
) -> Resolved:
    """`client` is "lib", "cli" or "srv". `layers` are (origin, values by field), later ones going before earlier ones
    field by field: ("generation_config", …), ("flag", …), ("request", …). A value of None was not given. `fresh_seed`
    is asked once when no seed was given, and its draw is reported like any other value.

    Raises RequestError for a value out of range, and with `strict` for one that cannot act.
    """
    values: dict[str, Any] = {}
    origin = dict.fromkeys(RULES, "default")
    for name, layer in (("default", CLIENT_DEFAULTS[client]), *layers):
        for field, value in layer.items():
            if value is not None:
                values[field] = value
                origin[field] = name
    params = SamplingParams(**values)
    warnings = inert(params, frozenset(field for field, name in origin.items() if name not in NOT_SAID))
    if strict and warnings:
        field, words = next(iter(warnings.items()))
        raise RequestError(words, field=field, hint="leave it out, or ask without --strict")
    if params.seed == -1:
        params = params.clone(seed=fresh_seed())
    return Resolved(params, origin, tuple(warnings.values()))
