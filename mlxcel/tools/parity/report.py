"""The table of a run, and its JSON (docs/spec/clients.md 5.4, 5.6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.tools.parity.pairs import Row
from mlxcel.tools.parity.run import Report
from mlxcel.tools.parity.stream import Failed, Missing, Stream
from mlxcel.version import version


def table(report: Report, tokenizer: Tokenizer) -> list[str]:
    """Lines for people: one a row, and below it how each side ran."""
    return list(_lines(report, tokenizer))


def _lines(report: Report, tokenizer: Tokenizer) -> Iterator[str]:
    facts, options = report.facts, report.setup.options
    yield (
        f"{facts.model} on {facts.backend} ({facts.device}, {facts.dtype}, level {facts.level}): "
        f"a prompt of {len(report.setup.prompt)} tokens, {options.max_tokens} a stream, "
        f"chunks of {options.chunks[0]} and {options.chunks[1]}, a crowd of {options.batch}, seed {options.seed}"
    )
    for row in report.rows:
        yield f"{row.case:<7} {row.group:<8} {row.left} = {row.right}: {says(row, tokenizer)}"
        for arm in (row.left, row.right):
            stream = report.stream(row.case, arm)
            if stream is not None:
                yield f"    {arm:<16} {how_it_ran(stream)}"
    counts = {result: sum(row.result == result for row in report.rows) for result in _RESULTS}
    counts["with other scores"] = sum(row.scores_step is not None for row in report.rows)
    yield ", ".join(f"{count} {result}" for result, count in counts.items() if count)


_RESULTS = ("identical", "near-tie", "diverge", "n/a", "failed")


def says(row: Row, tokenizer: Tokenizer) -> str:
    """What a row found."""
    scores = "" if row.scores_step is None else f", scores differ from step {row.scores_step}"
    if row.result == "identical":
        return f"identical ({row.length} tokens{scores})"
    if row.result in ("n/a", "failed"):
        return f"{row.result}: {row.reason}"
    place = f"{row.result}@{row.step}{' (first token)' if row.step == 0 else ''}"
    left = _side("left", row.left_token, row.left_gap, tokenizer)
    right = _side("right", row.right_token, row.right_gap, tokenizer)
    more = (
        "" if row.max_logprob_diff is None else f" largest difference of log-probabilities {row.max_logprob_diff:.3g}"
    )
    return f"{place} {left} {right}{more}{scores}"


def _side(name: str, token: int | None, gap: float | None, tokenizer: Tokenizer) -> str:
    if token is None:
        return f"{name}=<end>"
    piece = _quoted(tokenizer.token_bytes(token).decode(errors="replace"))
    return f"{name}={token} {piece} gap={'none' if gap is None else f'{gap:.4g}'}"


def _quoted(text: str) -> str:
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def how_it_ran(stream: Stream) -> str:
    """Positions of each piece as it was executed, where the KV was, and which attention ran."""
    adopted = f"adopted 0-{stream.adopted[1]}, " if stream.adopted[1] else ""
    pieces = " ".join(f"{start}-{end}{f'+{pad}' if pad else ''}" for start, end, pad in stream.pieces)
    ran = "; ".join(
        f"{phase} {', '.join(f'{route} {count}' for route, count in sorted(routes.items()))}"
        for phase, routes in sorted(stream.launches.items(), reverse=True)
    )
    unpaged = ", no paged launch" if stream.kv_storage == "paged" and not stream.paged_launches else ""
    seen = stream.company
    beside = f"; steps of {seen.fewest} to {seen.most} rows, as row {seen.place} or later" if seen.most > 1 else ""
    return f"{adopted}pieces {pieces}; {stream.kv_storage} storage{unpaged}; {ran or 'no launch counted'}{beside}"


def as_json(report: Report) -> dict[str, Any]:
    """Every stream that ran and every row."""
    facts, options, code = report.facts, report.setup.options, report.source
    return {
        "tool": "engine-parity",
        "version": version(),
        "commit": code.commit,
        "dirty": code.dirty,
        "model": facts.model,
        "backend": facts.backend,
        "device": facts.device,
        "dtype": facts.dtype,
        "level": facts.level,
        "prompt_tokens": len(report.setup.prompt),
        "prompt_token_ids": report.setup.prompt.tolist(),
        "n": options.max_tokens,
        "seed": options.seed,
        "chunks": list(options.chunks),
        "batch": options.batch,
        "gap_bound": report.gap_bound,
        "streams": [_stream(each) for each in report.found.values() if isinstance(each, Stream)],
        "absent": [
            {"case": case, "arm": report.names[letter], **_absence(each)}
            for (case, letter), each in report.found.items()
            if not isinstance(each, Stream)
        ],
        "pairs": [_pair(row) for row in report.rows],
        "exit_code": report.exit_code,
    }


def _stream(stream: Stream) -> dict[str, Any]:
    return {
        "case": stream.case,
        "arm": stream.arm,
        "token_ids": list(stream.token_ids),
        "top2": [[list(each) for each in best[:2]] for best in stream.best],
        "partition": {"adopted": list(stream.adopted), "pieces": [list(piece) for piece in stream.pieces]},
        "kv_storage": stream.kv_storage,
        "launches": stream.launches,
        "cached_tokens": stream.cached_tokens,
        "reproduces": stream.reproduces,
        "finish_cause": stream.finish_cause,
        "place": stream.company.place,
        "rows": [stream.company.fewest, stream.company.most],
        "ms": round(stream.ms, 3),
    }


def _absence(found: Missing | Failed) -> dict[str, str]:
    if isinstance(found, Failed):
        return {"result": "failed", "reason": found.message}
    return {"result": "n/a", "reason": str(found), "detail": found.detail}


def _pair(row: Row) -> dict[str, Any]:
    values = attrs.asdict(row, filter=lambda field, value: field.name not in ("length", "step", "scores_step"))
    return {**values, "first_divergent_index": row.step, "first_other_scores": row.scores_step}
