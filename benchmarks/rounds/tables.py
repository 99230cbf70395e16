"""Summaries and comparisons as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rounds.records import Record

UNITS = {"ttft_ms": "ms", "decode_tok_s": "tok/s", "ms_per_token": "ms"}


def summary_lines(summaries: Sequence[Record]) -> Iterator[str]:
    """Nothing but what the records hold."""
    for cell, records in groupby(summaries, key=cell_words):
        yield cell
        for record in records:
            yield from _metric_lines(record)
    if any(record["partial"] for record in summaries):
        yield "PARTIAL: not every process of the plan gave rows"
    if any(record["busy_rounds"] for record in summaries):
        yield "* in some rounds the host was busy when this ran"
    yield from _widest_lines(summaries)


def cell_words(record: Record) -> str:
    return f"{record['path']}, prompt of {record['prompt_target_len']}, batch {record['batch']}"


def _metric_lines(record: Record) -> Iterator[str]:
    yield f"  {record['metric']} ({UNITS[record['metric']]})"
    width = max(map(len, record["arms"]))
    for name, spread in record["arms"].items():
        mark = "*" if name in record["busy_rounds"] else " "
        line = f"   {mark}{name:<{width}}  {_number(spread['median'])} {_range(spread)}, {_rounds(spread['rounds'])}"
        yield line + _difference(record["deltas"].get(name) or record["nulls"].get(name))


def _difference(delta: dict[str, Any] | None) -> str:
    if delta is None:
        return ""
    sides = f"{delta['median']:+.2f} % ({delta['min']:+.2f} … {delta['max']:+.2f}) against {delta['against']}"
    noise = "  within noise" if delta.get("within_noise") else ""
    return f"  {sides}, {delta['same_sign']} of {delta['rounds']} the same way{noise}"


def _widest_lines(summaries: Sequence[Record]) -> Iterator[str]:
    """The figures that a regression threshold is made from: one round's, and those of medians."""
    if not summaries:
        yield "no process gave a row"
        return
    nulls = [(record, null) for record in summaries for null in record["nulls"].values()]
    if not nulls:
        yield "no differences: they need two rounds or more"
        return
    for what, sizes in (
        ("in one round", [max(abs(null["min"]), abs(null["max"])) for _, null in nulls]),
        ("of a median", [abs(null["median"]) for _, null in nulls]),
    ):
        size, (record, _) = max(zip(sizes, nulls, strict=True), key=lambda pair: pair[0])
        up = math.ceil(size * 2) / 2
        where = f"{record['metric']}; {cell_words(record)}"
        yield f"widest null difference {what}: {size:.2f} %, rounded up to a half {up:.1f} % ({where})"


def _range(spread: dict[str, Any]) -> str:
    return f"({_number(spread['min'])} … {_number(spread['max'])})"


def _rounds(count: int) -> str:
    return f"{count} round" if count == 1 else f"{count} rounds"


def _number(value: float) -> str:
    return f"{value:.5g}"
