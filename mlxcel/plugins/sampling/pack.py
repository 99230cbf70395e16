"""What the stages from the filters on need of a row: fixed when it opens, stacked for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from mlxcel.core.params import FIRST_FILTER, GREEDY_TEMPERATURE, LAST_FILTER, STAGE_NAMES, SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.sampling.adaptive import start
from mlxcel.plugins.sampling.ends import MOST, few_ends
from mlxcel.plugins.sampling.leading import LISTED
from mlxcel.plugins.sampling.logprobs import listed
from mlxcel.plugins.sampling.pairs import NOBODY, closed_width, pack_lists
from mlxcel.plugins.sampling.stage import RowState

DRAW: Final = "draw"
"""Under this name `RowState.prepared` holds the row's Drawing."""

ENDS: Final = "ends"
"""The feature of rows that ignore the model's ends."""

FEATURES: Final = (
    ENDS,
    *("temperature_first", "top_n_sigma", "top_k", "far", "typ_p", "top_p", "min_p", "xtc", "min_keep", "temperature"),
    *("dynatemp", "cold", "adaptive_p", "mirostat_1", "mirostat_2", DRAW, "raw_logprobs", "processed_logprobs"),
)
"""What a step may have behind the logit stages. Together they are the static part of a step; values never are.

"far" is no stage of its own: thresholds of top_k and top_p that may lie behind the LISTED largest values of a row."""

CARRYING: Final = ("adaptive_p", "mirostat_1", "mirostat_2")
"""Those of them whose rows have numbers that move from token to token."""

OFF: Final[Mapping[str, float]] = {"top_n_sigma": 0, "typ_p": 1, "top_p": 1, "min_p": 0}
"""Values by which a row says that it does not use a filter. That of top_k is V."""

_ROW: Final = np.dtype(
    [
        ("greedy", np.bool_),
        ("ends", np.int32, (MOST,)),  # ids that the row ignores
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("top_n_sigma", np.float32),
        ("top_k", np.int32),
        ("typ_p", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("xtc_probability", np.float32),
        ("xtc_threshold", np.float32),
        ("min_keep", np.int32),
        ("temperature", np.float32),
        ("temperature_first", np.bool_),
        ("dynatemp_range", np.float32),
        ("dynatemp_exponent", np.float32),
        ("adaptive_target", np.float32),
        ("adaptive_decay", np.float32),
        ("mirostat", np.int32),
        ("mirostat_tau", np.float32),
        ("mirostat_eta", np.float32),
        ("processed", np.bool_),
        ("compared", np.bool_),
        ("listed", np.bool_),  # whether it wants log-probabilities
    ]
)

_EXEMPT_WIDTH: Final = 16
"""Ends of most models."""

_TINY: Final = float(np.finfo(np.float32).tiny)


@attrs.frozen(eq=False)
class Drawing:
    """A row's part of the arrays, and the features it uses."""

    record: bytes  # of _ROW: joined, the bytes of many rows are an array of them
    decay: np.float32  # of adaptive-p
    features: frozenset[str]
    exempt: np.ndarray  # int32, ends E of the row, for XTC
    listed: int | None  # entries of its list of logprobs, None without logprobs

    @property
    def memoryless(self) -> bool:
        """Whether no number of it moves from token to token."""
        return self.features.isdisjoint(CARRYING)


def prepare_drawing(spec: SequenceSpec, vocab: int) -> Drawing:
    """What `spec` comes to for a vocabulary of V = `vocab`. A field that its row does not use has its off value."""
    p = spec.params
    ends = few_ends(spec, vocab)
    features = _features(spec, vocab) | ({ENDS} if (ends != NOBODY).any() else frozenset())
    threshold = min(p.xtc_threshold, 0.5)
    values: dict[str, Any] = {
        "greedy": p.greedy,
        "ends": ends,
        "seed_low": p.seed & 0xFFFFFFFF,
        "seed_high": p.seed >> 32 & 0xFFFFFFFF,
        # A value above its off value stays there in float32.
        "top_n_sigma": max(p.top_n_sigma, _TINY) if "top_n_sigma" in features else OFF["top_n_sigma"],
        "top_k": p.top_k if "top_k" in features else vocab,
        "typ_p": p.typical_p if "typ_p" in features else OFF["typ_p"],
        "top_p": p.top_p if "top_p" in features else OFF["top_p"],
        "min_p": p.min_p if "min_p" in features else OFF["min_p"],
        "xtc_probability": p.xtc_probability if "xtc" in features else 0,
        "xtc_threshold": threshold,
        "min_keep": min(p.min_keep, vocab) if "min_keep" in features else 1,
        "temperature": _temperature(p),
        "temperature_first": "temperature_first" in features,
        "dynatemp_range": p.dynatemp_range if "dynatemp" in features else 0,
        "dynatemp_exponent": p.dynatemp_exponent,
        "adaptive_target": p.adaptive_target if "adaptive_p" in features else -1,
        "adaptive_decay": p.adaptive_decay,
        "mirostat": p.mirostat,
        "mirostat_tau": p.mirostat_tau,
        "mirostat_eta": p.mirostat_eta,
        "processed": _processed(spec),
        "compared": spec.compared,
        "listed": p.logprobs is not None,
    }
    record = np.array([tuple(values[name] for name in _ROW.names or ())], _ROW)
    count = None if p.logprobs is None else listed(p.logprobs, vocab)
    exempt = np.array(sorted(token for token in spec.eos_ids if token < vocab), np.int32)
    return Drawing(record.tobytes(), record["adaptive_decay"][0], features, exempt, count)


def _features(spec: SequenceSpec, vocab: int) -> frozenset[str]:
    p = spec.params
    found = {"processed_logprobs" if _processed(spec) else "raw_logprobs"} if p.logprobs is not None else set()
    if p.greedy:
        return frozenset(found)
    found.add(DRAW)
    if p.dynatemp_range > 0 and p.runs("temperature"):
        found |= {"dynatemp", "cold"}
    if _temperature(p) != 1 or "dynatemp" in found:
        found.add("temperature_first" if _temperature_first(p) else "temperature")
    if p.mirostat:
        found.add(f"mirostat_{p.mirostat}")
        if _temperature(p) == 0:
            found.add("cold")
        return frozenset(found)
    uses = {
        "top_n_sigma": p.top_n_sigma > 0,
        "top_k": 0 < p.top_k < vocab,
        "typ_p": p.typical_p < 1,
        "top_p": p.top_p < 1,
        "min_p": p.min_p > 0,
        "xtc": p.xtc_probability > 0 and p.xtc_threshold <= 0.5,
        "adaptive_p": p.adaptive_target > 0,
    }
    found |= {name for name, used in uses.items() if used and p.runs(name)}
    if ("top_k" in found and p.top_k > LISTED) or ("top_p" in found and "top_k" not in found):
        found.add("far")
    if p.min_keep >= 2 and found & {"typ_p", "top_p", "min_p", "xtc"}:
        found.add("min_keep")
    return frozenset(found)


def _temperature(p: SamplingParams) -> float:
    """The divisor; 1 for a row without one, 0 for one that is as good as greedy."""
    if p.greedy or not p.runs("temperature"):
        return 1.0
    return 0.0 if p.temperature < GREEDY_TEMPERATURE and p.dynatemp_range == 0 else p.temperature


def _temperature_first(p: SamplingParams) -> bool:
    """Whether `samplers` puts the temperature before the first filter (spec S2)."""
    if p.samplers is None or "temperature" not in p.samplers:
        return False
    filters = STAGE_NAMES[FIRST_FILTER : LAST_FILTER + 1]
    return any(name in filters for name in p.samplers[p.samplers.index("temperature") :])


def _processed(spec: SequenceSpec) -> bool:
    return spec.compared or spec.params.logprobs_mode == "processed" or spec.params.post_sampling_probs


def pack_drawing(drawings: Sequence[Drawing], vocab: int) -> dict[str, np.ndarray]:
    """Arrays [R, …] of every feature, whichever a step has: their names and shapes are always the same, but for
    `xtc_exempt`, which is there where a row uses XTC and as wide as one of a closed set."""
    records = np.frombuffer(b"".join([drawing.record for drawing in drawings]), _ROW)
    arrays = {name: records[name].copy() for name in _ROW.names or ()}
    if any("xtc" in drawing.features for drawing in drawings):
        most = max(len(drawing.exempt) for drawing in drawings)
        width = closed_width(most, vocab, least=_EXEMPT_WIDTH)
        arrays["xtc_exempt"] = pack_lists([drawing.exempt for drawing in drawings], width, fill=NOBODY)
    return arrays


def pack_carried(rows: Sequence[RowState], decay: np.ndarray, ahead: np.ndarray) -> dict[str, np.ndarray]:
    """float32 [R] of what moves with each token: mu, and adaptive-p's sum and weight. bool [R] `ahead`: where a draw is
    in flight, the weight is as it will be behind it. That draw's token does not matter for it."""
    weight = np.array([row.adaptive[1] for row in rows], np.float32)
    return {
        "mu": np.array([row.mu for row in rows], np.float32),
        "adaptive_total": np.array([row.adaptive[0] for row in rows], np.float32),
        "adaptive_weight": np.where(ahead, next_weight(decay, weight), weight),
    }


def next_weight(decay: Any, weight: Any) -> Any:
    """w = 1 + d w of adaptive-p, of float32 numbers or arrays (spec S26)."""
    return np.float32(1) + decay * weight


def first_state(spec: SequenceSpec) -> tuple[float, tuple[float, float]]:
    """mu = 2 tau of mirostat (spec S30), and adaptive-p's sum and weight before anything was drawn."""
    p = spec.params
    total, weight = start(p.adaptive_target, p.adaptive_decay)
    return float(np.float32(2 * p.mirostat_tau)), (float(np.float32(total)), float(np.float32(weight)))
