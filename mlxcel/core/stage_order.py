"""The stages of the sampler chain by name: their one order, and which lists of them a request may give (spec 4.1)."""

from __future__ import annotations

from typing import Any

from mlxcel.core.param_rules import Rule, refused, too_many
from mlxcel.errors import RequestError, shown

STAGE_NAMES = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"),
)
"""Names that `samplers` knows, in the one order they may stand in (spec S1)."""

FIRST_FILTER, LAST_FILTER = STAGE_NAMES.index("top_n_sigma"), STAGE_NAMES.index("xtc")

SEQUENCE_LETTERS = dict(zip("edskypmxta", STAGE_NAMES, strict=True))
"""Letters of `--sampling-seq`."""

_PLACE = {name: place for place, name in enumerate(STAGE_NAMES)}
_WORDS = f"a list of stages in this order: {', '.join(STAGE_NAMES)} (temperature may stand before the first filter)"


def _read(field: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise refused(field, _WORDS, value)
    if len(value) > len(STAGE_NAMES):
        raise too_many(field, _WORDS, len(value))
    unknown = [name for name in value if name not in _PLACE]
    if unknown:
        raise RequestError(f"{field}: no stage is called {shown(unknown[0])}; it must be {_WORDS}", field=field)
    twice = [name for place, name in enumerate(value) if name in value[:place]]
    if twice:
        raise RequestError(f"{field} names {twice[0]} twice; it must be {_WORDS}", field=field)
    if not in_order(tuple(value)):
        raise RequestError(f"{field} must be {_WORDS}, not {shown(', '.join(value))}", field=field)
    return tuple(value)


SAMPLERS = Rule(_WORDS, _read)


def in_order(names: tuple[str, ...]) -> bool:
    """Spec S1 and S2, of known names, none of them twice: a subsequence of STAGE_NAMES, but that `temperature` may
    stand directly before the first filter."""
    places = [_PLACE[name] for name in names]
    if places == sorted(places):
        return True
    if "temperature" not in names:
        return False
    at = names.index("temperature")
    before, after = places[:at], places[at + 1 :]
    in_turn = before + after == sorted(before + after)
    return in_turn and all(place < FIRST_FILTER for place in before) and all(place >= FIRST_FILTER for place in after)
