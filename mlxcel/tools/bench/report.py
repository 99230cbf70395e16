"""The table that people read of a run: the medians of each cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Summary = Mapping[str, Any]

_COLUMNS: Final = (
    *("path", "rows", "prompt", "storage", "first token ms", "prompt tok/s", "tok/s a row", "tok/s in all"),
    *("ms a token", "GB/s", "of copy"),
)


def table(summaries: Sequence[Summary]) -> Iterator[str]:
    """Lines of equal columns; behind a cell with a note, a mark, and the notes below."""
    rows = [_COLUMNS, *(_cells(found) for found in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for place, row in enumerate(rows):
        mark = " *" if place and summaries[place - 1]["note"] else ""
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) + mark
    for note in dict.fromkeys(found["note"] for found in summaries if found["note"]):
        yield f"* {note}"


def _cells(found: Summary) -> tuple[str, ...]:
    share = found["percent_of_copy"]
    return (
        found["path"],
        str(found["batch"]),
        str(found["prompt_tokens"]),
        found["kv_storage"],
        f"{found['ttft_ms']['median']:.1f}",
        f"{found['prefill_tok_s']['median']:.0f}",
        f"{found['decode_tok_s']['median']:.1f}",
        f"{found['decode_tok_s_total']['median']:.1f}",
        f"{found['ms_per_token']['median']:.3f}",
        f"{found['achieved_gb_s']['median']:.1f}",
        "–" if share is None else f"{share['median']:.1f} %",
    )
