"""What rounds come to: medians, differences between arms in the same round, and what no difference looks like."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rounds.records import Record, of_kind

METRICS = ("ttft_ms", "decode_tok_s", "ms_per_token")
LEAST_ROUNDS = 2
"""That two arms share, for differences between them."""

Cell = tuple[Any, Any, Any]
"""Path, tokens of the prompt, rows."""
Values = dict[str, dict[int, float]]
"""Of one metric of a cell, by arm and round: the median of the repeats of that process."""


def summarise(records: Sequence[Record]) -> list[Record]:
    """One record a path, prompt, batch and metric, in the order in which the rows came.

    Rows of processes that did not end with 0 count for nothing. Differences are in percent of the arm they are
    against: the first arm, and of a null arm its source. `widest_null_percent` is the largest difference of a null arm
    in any round, whichever its sign; a difference whose median is no larger is `within_noise`.
    """
    header = of_kind(records, "header")[0]
    names = [arm["name"] for arm in header["arms"]]
    sources = {null["name"]: null["source"] for null in header["nulls"]}
    rows = [row for row in of_kind(records, "row") if row.get("exit_code") == 0]
    partial = _planned(records) > len({(row["arm"], row["round"]) for row in rows})
    found: list[Record] = []
    for cell in dict.fromkeys(cell_of(row) for row in rows):
        for metric in METRICS:
            values = _values((row for row in rows if cell_of(row) == cell), metric)
            if not values:
                continue
            nulls = _deltas(values, sources)
            widest = max((max(abs(null["min"]), abs(null["max"])) for null in nulls.values()), default=None)
            deltas = _deltas(values, dict.fromkeys(names[1:], names[0]))
            for delta in deltas.values():
                delta["within_noise"] = None if widest is None else abs(delta["median"]) <= widest
            found.append({
                "kind": "summary", "path": cell[0], "prompt_target_len": cell[1], "batch": cell[2], "metric": metric,
                "arms": {name: _spread(values[name].values()) for name in [*names, *sources] if name in values},
                "deltas": deltas, "nulls": nulls, "widest_null_percent": widest,
                "busy_rounds": _busy(row for row in rows if cell_of(row) == cell), "partial": partial,
            })  # fmt: skip
    return found


def cell_of(row: Mapping[str, Any]) -> Cell:
    return row.get("path"), row.get("prompt_target_len", row.get("prompt_tokens")), row.get("batch")


def _planned(records: Sequence[Record]) -> int:
    """Processes."""
    headers = of_kind(records, "header")
    return sum(header["rounds"] * (len(header["arms"]) + len(header["nulls"])) for header in headers)


def _values(rows: Iterable[Record], metric: str) -> Values:
    repeats: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if _is_number(row.get(metric)):
            repeats[row["arm"]][row["round"]].append(row[metric])
    return {
        arm: {turn: statistics.median(each) for turn, each in by_round.items()} for arm, by_round in repeats.items()
    }


def _deltas(values: Values, against: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By arm; an arm that shares too few rounds with the one it is against has none."""
    found = {}
    for name, base in against.items():
        mine, theirs = values.get(name, {}), values.get(base, {})
        shared = [turn for turn in sorted(mine) if theirs.get(turn)]
        percents = [100 * (mine[turn] / theirs[turn] - 1) for turn in shared]
        if len(percents) >= LEAST_ROUNDS:
            middle = statistics.median(percents)
            agree = sum(_sign(percent) == _sign(middle) for percent in percents)
            found[name] = {"against": base, **_spread(percents), "same_sign": agree}
    return found


def _spread(values: Iterable[float]) -> dict[str, Any]:
    kept = list(values)
    return {"median": statistics.median(kept), "min": min(kept), "max": max(kept), "rounds": len(kept)}


def _busy(rows: Iterable[Record]) -> dict[str, list[int]]:
    """Rounds of each arm that ran although the host was busy."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for row in rows:
        if row.get("gate_reason"):
            found[row["arm"]].add(row["round"])
    return {arm: sorted(turns) for arm, turns in found.items()}


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
