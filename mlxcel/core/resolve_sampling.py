"""The one place where parameters that were not given become values (docs/spec/clients.md 0.1, spec E0b, S6 to S9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from mlxcel.core.inert import inert
from mlxcel.core.param_table import CLIENT_DEFAULTS, RULES
from mlxcel.core.params import SamplingParams
from mlxcel.core.stage_order import STAGE_NAMES
from mlxcel.errors import RequestError

NOT_SAID = frozenset({"default", "generation_config"})
"""Origins of values that nobody asked for: they are not warned about."""


@attrs.frozen
class Resolved:
    """Effective parameters, where each value came from, and accepted values that cannot act."""

    params: SamplingParams
    origin: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """The stages that act on this row, as they run: names of `samplers`, and "mirostat"."""
        return acting_order(self.params)


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


def acting_order(params: SamplingParams) -> tuple[str, ...]:
    """What runs for a row with these parameters, in order (spec S1, S32): a greedy row leaves after the penalties."""
    windows = params.repetition_penalty != 1 or params.window_presence_penalty or params.window_frequency_penalty
    penalties = params.presence_penalty or params.frequency_penalty or (windows and params.repeat_last_n)
    on = {
        "penalties": bool(penalties),
        "dry": params.dry_multiplier > 0 and params.dry_penalty_last_n != 0,
        "top_n_sigma": params.top_n_sigma > 0,
        "top_k": params.top_k > 0,
        "typ_p": params.typical_p < 1,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
        "xtc": params.xtc_probability > 0 and params.xtc_threshold <= 0.5,
        "temperature": params.temperature != 1 or params.dynatemp_range > 0,
        "adaptive_p": params.adaptive_target > 0,
    }
    if params.mirostat:
        return (*(name for name in ("penalties", "dry", "temperature") if on[name]), "mirostat")
    names = params.samplers if params.samplers is not None else STAGE_NAMES
    if params.greedy:
        names = tuple(name for name in names if name in ("penalties", "dry"))
    return tuple(name for name in names if on[name])
