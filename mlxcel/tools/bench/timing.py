"""From the moments at which tokens came to the figures of a run (docs/spec/clients.md 6.3)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

import attrs

MS: Final = 1e6
"""Nanoseconds of a millisecond."""


@attrs.frozen
class RowTimes:
    """Nanoseconds of one row: its ids were handed to the client at `handed`, token i was resolved at `tokens[i]`. At
    least two tokens."""

    handed: int
    tokens: tuple[int, ...]

    @property
    def ttft_ms(self) -> float:
        return (self.tokens[0] - self.handed) / MS

    @property
    def intervals(self) -> list[float]:
        """Milliseconds from one token to the next: N tokens have N - 1."""
        return [(after - before) / MS for before, after in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def decode_ms(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / MS

    @property
    def decode_tok_s(self) -> float:
        return 1e3 * (len(self.tokens) - 1) / self.decode_ms


def figures(rows: Sequence[RowTimes], prompt_tokens: int) -> dict[str, Any]:
    """Of the rows of one run, by the names of its record. Each has `prompt_tokens` tokens of prompt.

    A rate and a time of "a row" are the median of the rows' own. What is of all together: `ttft_ms` until the last row
    has its first token, `decode_ms` from the first token of any row to the last of any, and in it all intervals.
    """
    ttft = max(row.ttft_ms for row in rows)
    begin, end = min(row.tokens[0] for row in rows), max(row.tokens[-1] for row in rows)
    decode = (end - begin) / MS
    gaps = sorted(gap for row in rows for gap in row.intervals)
    return {
        "ttft_ms": ttft,
        "prefill_tok_s": 1e3 * len(rows) * prompt_tokens / ttft,
        "decode_ms": decode,
        "intervals": len(gaps),
        "decode_tok_s": statistics.median(row.decode_tok_s for row in rows),
        "decode_tok_s_total": 1e3 * len(gaps) / decode,
        "ms_per_token": statistics.median(row.decode_ms / (len(row.tokens) - 1) for row in rows),
        "itl_ms": {
            "p50": percentile(gaps, 50),
            "p90": percentile(gaps, 90),
            "p99": percentile(gaps, 99),
            "max": gaps[-1],
        },
        "rows": [
            {"ttft_ms": row.ttft_ms, "decode_ms": row.decode_ms, "decode_tok_s": row.decode_tok_s} for row in rows
        ],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, on the line between the two that are nearest."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
