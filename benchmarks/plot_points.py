"""Rates from records of every kind that is plotted: what was measured, of what, and how it was taken."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

Kind = Literal["context", "batch"]
PEERS = Path(__file__).parent / "peers.json"


@attrs.frozen
class Line:
    """Rates of one system in one picture. `how` says how they were taken; `own` are ours, `bound` is what nobody
    measured."""

    shape: str
    kind: Kind
    name: str
    how: str
    own: bool = True
    bound: bool = False


@attrs.frozen(order=True)
class Point:
    """`x` tokens of context, or rows; `low` … `high` is the range of the rounds or repeats, tok/s all three."""

    x: float
    rate: float
    low: float
    high: float


Points = dict[Line, list[Point]]


def read_points(files: Iterable[Path]) -> Points:
    """Of records of benchmarks/decode.py, of `mlxcel bench-engine`, and of benchmarks/engine_bench_rounds.py.
    ValueError for a file of anything else."""
    found: defaultdict[Line, list[Point]] = defaultdict(list)
    for file in files:
        read = 0
        for line, point in _of_file(file):
            found[line].append(point)
            read += 1
        if not read:
            raise ValueError(f"{file} holds no rates: it is no record of decode.py, bench-engine or rounds")
    return {line: sorted(points) for line, points in found.items()}


def peer_points(file: Path = PEERS) -> Points:
    """Others' figures, as they were taken."""
    found: Points = {}
    told = json.loads(file.read_text(encoding="utf-8"))
    for system in told["systems"]:
        for shape, figures in system["shapes"].items():
            kind: Kind
            for kind in ("context", "batch"):
                if points := [Point(float(x), rate, rate, rate) for x, rate in figures.get(kind, {}).items()]:
                    how = f"{system['how']}, {told['how'][kind]}"
                    line = Line(shape, kind, system["name"], how, own=False, bound=system.get("bound", False))
                    found[line] = sorted(points)
    return found


def _of_file(file: Path) -> Iterator[tuple[Line, Point]]:
    text = file.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
    except ValueError:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        yield from _of_lines(file, lines)
        return
    if isinstance(whole, dict) and "sections" in whole:
        yield from _of_decode(whole)


# --- benchmarks/decode.py ---------------------------------------------------------------------------------------------


def _of_decode(record: Mapping[str, Any]) -> Iterator[tuple[Line, Point]]:
    sections, commit = record["sections"], record["commit"]

    def taken(by: str, rows: str) -> str:
        return f"decode.py: {by}, {rows}, median of rounds, commit {commit}"

    for row in sections.get("lone", []) + sections.get("batch", []):
        if "rows" in row and row["rows"] == 1:
            how = taken(f"Engine, {row['storage']} KV", "one row, lengths around the context")
            yield Line(row["shape"], "context", "mlxcel", how), _timed(row, row["keys"])
    for row in sections.get("batch", []):
        how = taken(f"Engine, {row['storage']} KV", f"{row['keys']} tokens of context")
        if row["rows"] > 1:
            yield Line(row["shape"], "batch", "mlxcel", how), _timed(row, row["rows"])
    for row in sections.get("concurrency", []):
        how = taken("Scheduler", "prompts of 32 tokens that come together, from the first request to the last token")
        line = Line(row["shape"], "batch", "mlxcel", how)
        yield line, Point(row["requests"], row["tok_per_s"], *row["tok_per_s_range"])


def _timed(row: Mapping[str, Any], x: float) -> Point:
    """ms of a step, of all its rows."""
    fastest, slowest = row["ms_range"]
    return Point(x, row["tok_per_s"], 1e3 * row["rows"] / slowest, 1e3 * row["rows"] / fastest)


# --- bench-engine, alone and in rounds --------------------------------------------------------------------------------


def _of_lines(file: Path, records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Line, Point]]:
    """Rows of one cell and arm are one point. Null arms are no lines: they are their sources' once more."""
    headers = [record for record in records if record.get("kind") == "header"]
    if not headers:
        raise ValueError(f"{file} has no header")
    header = headers[0]
    program = header.get("program", header)
    shape = str(header["model"]).removeprefix("random:")
    nulls = {null["name"] for null in header.get("nulls", [])}
    cells: defaultdict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in records:
        if row.get("kind") == "row" and row.get("arm") not in nulls and row.get("exit_code", 0) == 0:
            names = ("arm", "path", "kv_storage", "batch", "prompt_tokens", "max_tokens")
            cells[tuple(row.get(name) for name in names)].append(row)
    for (arm, path, storage, batch, prompt, tokens), rows in cells.items():
        rounds = len({row["round"] for row in rows}) if arm is not None else 0
        by = f"rounds, arm {arm}: median of {rounds} rounds" if rounds else f"median of {len(rows)} repeats"
        commit = commit_of(program)
        how = f"bench-engine, {path} path, {storage} KV, {by}, commit {commit}"
        if batch == 1:
            rates = [row["decode_tok_s"] for row in rows]
            yield Line(shape, "context", "mlxcel", how), _median(prompt + tokens / 2, rates)
        if path == "scheduler":
            rates = [row["decode_tok_s_total"] for row in rows]
            line = Line(shape, "batch", "mlxcel", f"{how}, prompts of {prompt}")
            yield line, _median(batch, rates)


def commit_of(program: Mapping[str, Any]) -> str:
    """Of a header. A tree without its history knows of none: then the label says which it was."""
    found = program.get("commit") or "unknown"
    return str(program.get("label") or found) if found == "unknown" else str(found)


def _median(x: float, rates: Sequence[float]) -> Point:
    return Point(x, statistics.median(rates), min(rates), max(rates))
