"""The spec of one sequence, and the one place where parameters that were not given become values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from mlxcel.core.params import RULES, SamplingParams


@attrs.frozen(eq=False)
class SequenceSpec:
    """One sequence, complete: nothing in it is left to a default.

    prompt_ids: int32 [P]. `params` has its seed drawn. `eos_ids` is the set E of docs/spec/engine.md 5.2.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    choice: int = 0


CLIENT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"lib": {}, "cli": {"temperature": 0.0}}
"""What a client asks for where nobody says anything (spec D2): the library is neutral, a command repeats itself."""


@attrs.frozen
class Resolved:
    """Effective parameters, where each value came from, and accepted values that cannot act."""

    params: SamplingParams
    origin: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def resolve_sampling(
    client: str,
    given: Mapping[str, Any],
    *,
    given_origin: str = "flag",
    generation_config: Mapping[str, Any] | None = None,
    fresh_seed: Callable[[], int],
) -> Resolved:
    """The one place where "not given" becomes a value, for every client (spec E0b, docs/spec/clients.md 0.1).

    `given` holds only what was said (None counts as not said); `generation_config` what its mode lets through;
    `fresh_seed` is asked once when no seed was said, and its draw is reported like any other value.
    """
    values: dict[str, Any] = {}
    origin = dict.fromkeys(RULES, "default")
    layers = (
        ("default", CLIENT_DEFAULTS[client]),
        ("generation_config", generation_config or {}),
        (given_origin, given),
    )
    for name, layer in layers:
        for field, value in layer.items():
            if value is not None:
                values[field] = value
                origin[field] = name
    params = SamplingParams(**values)
    if params.seed == -1:
        params = params.clone(seed=fresh_seed())
    return Resolved(params, origin, _inert(params, origin))


def _inert(params: SamplingParams, origin: Mapping[str, str]) -> tuple[str, ...]:
    """Accepted values that cannot change this reply (spec S9)."""
    if not params.greedy:
        return ()
    idle = [field for field in ("top_k", "top_p", "min_p", "seed") if origin[field] in ("flag", "request")]
    if params.top_k == 1 and "top_k" in idle:
        idle.remove("top_k")
    return tuple(f"{field} has no effect: the reply is greedy" for field in idle)
