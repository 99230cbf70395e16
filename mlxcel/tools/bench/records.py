"""The lines of a run, by the names of docs/spec/clients.md 6.4: one header, a row a repeat, a summary a cell."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from mlxcel.tools.bench.cells import SHAPE
from mlxcel.tools.machine import cuda, driver, machine, package, source
from mlxcel.version import version

if TYPE_CHECKING:
    from mlxcel.load import LoadedModel
    from mlxcel.tools.bench.traffic import Traffic

TOOL: Final = "bench-engine"
SUMMED: Final = (
    *("ttft_ms", "prefill_tok_s", "decode_tok_s", "decode_tok_s_total", "ms_per_token"),
    *("achieved_gb_s", "percent_of_copy"),
)
"""Figures of a row whose median, minimum and maximum a summary has."""
COPY_SPREAD_PERCENT: Final = 5.0
"""Between the copy before the cells and the one behind them: beyond, the summaries say so."""


def header(model: LoadedModel, traffic: Traffic, **of_run: Any) -> dict[str, Any]:
    """What is measured, and where. `of_run` is what the caller knows: `random_weights`, `label`, `argv`, `env`,
    `copy_gb_s`."""
    facts, caps, tree = model.facts, model.caps, source()
    on_gpu = caps.platform == "cuda"
    return {
        "kind": "header",
        "tool": TOOL,
        "version": version(),
        "commit": tree.commit,
        "dirty": tree.dirty,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpu": machine(),
        "device": caps.device,
        "driver": driver() if on_gpu else None,
        "cuda": cuda() if on_gpu else None,
        "python": platform.python_version(),
        "jax": package("jax"),
        "jaxlib": package("jaxlib"),
        "numpy": package("numpy"),
        "backend": model.backend,
        "level": model.engine.level,
        "dtype": caps.dtype,
        "model": facts.name,
        "family": facts.family,
        "quantisation": facts.quantisation,
        "params": facts.parameters,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes_per_token": traffic.kv_bytes_per_token,
        **of_run,
    }


def summary(rows: Sequence[Mapping[str, Any]], copy_gb_s: Sequence[float]) -> dict[str, Any]:
    """Of all rows of a cell. `copy_gb_s` are the copies before and behind all cells: `percent_of_copy` is of their mean
    here, and of the first in a row. Empty where none was made."""
    mean = statistics.mean(copy_gb_s) if copy_gb_s else None
    measured = [{**row, "percent_of_copy": mean and 100 * row["achieved_gb_s"] / mean} for row in rows]
    first = rows[0]
    notes = list(dict.fromkeys(row["note"] for row in rows if row["note"]))
    if mean is not None and 100 * (max(copy_gb_s) - min(copy_gb_s)) / mean > COPY_SPREAD_PERCENT:
        notes.append(f"the two copies differ by more than {COPY_SPREAD_PERCENT:g} %: something else ran here")
    return {
        "kind": "summary",
        **{name: first[name] for name in SHAPE},
        "prompt_tokens": first["prompt_tokens"],
        "kv_storage": first["kv_storage"],
        "repeats": len(rows),
        **{name: spread([row[name] for row in measured]) for name in SUMMED},
        "copy_gb_s": list(copy_gb_s),
        "note": "; ".join(notes) or None,
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, minimum and maximum; None where a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}
