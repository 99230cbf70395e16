"""Which stages act on a row, in the order they run: what reports say of it (spec S1, S7)."""

from __future__ import annotations

from mlxcel.core.params import SamplingParams
from mlxcel.core.stage_order import STAGE_NAMES

MIROSTAT = "mirostat"


def acting_order(params: SamplingParams, vocab: int | None = None) -> tuple[str, ...]:
    """Names of `samplers` and "mirostat". A greedy row leaves after the penalties (stage 7); mirostat takes the place
    of the filters (S32). A top_k of V = `vocab` or more does nothing."""
    on = {
        "penalties": _penalises(params),
        "dry": params.dry_multiplier > 0 and params.dry_penalty_last_n != 0,
        "top_n_sigma": params.top_n_sigma > 0,
        "top_k": params.top_k > 0 and (vocab is None or params.top_k < vocab),
        "typ_p": params.typical_p < 1,
        "top_p": params.top_p < 1,
        "min_p": params.min_p > 0,
        "xtc": params.xtc_probability > 0 and params.xtc_threshold <= 0.5,
        "temperature": params.temperature != 1 or params.dynatemp_range > 0,
        "adaptive_p": params.adaptive_target > 0,
    }
    names = params.samplers if params.samplers is not None else STAGE_NAMES
    if params.mirostat:
        names = ("penalties", "dry", "temperature")
    elif params.greedy:
        names = tuple(name for name in names if name in ("penalties", "dry"))
    acting = tuple(name for name in names if on[name])
    return (*acting, MIROSTAT) if params.mirostat else acting


def looks_at_a_window(params: SamplingParams) -> bool:
    """Whether a penalty that counts `repeat_last_n` tokens is asked for."""
    window = params.window_presence_penalty != 0 or params.window_frequency_penalty != 0
    return params.repetition_penalty != 1 or window


def _penalises(params: SamplingParams) -> bool:
    of_output = params.presence_penalty != 0 or params.frequency_penalty != 0
    return of_output or (looks_at_a_window(params) and params.repeat_last_n != 0)
