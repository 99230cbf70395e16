"""The page of a baseline, from its records: what was measured, how far the arms are apart, and whether the bits agree.

    python benchmarks/baseline_page.py RECORDS... --title "..." --out docs/benchmark_results/PAGE.md

RECORDS are files of engine_bench_rounds.py, of `mlxcel bench-engine --out` and of `mlxcel engine-parity --json`, in any
order, which the page links to. What they decide is added by decisions.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from decisions import FIGURES, rows
from plot_points import commit_of
from rounds.records import Refused, of_kind, parse_line
from rounds.summary import summarise

Record = dict[str, Any]
UNITS = {"ttft_ms": "first token, ms", "decode_tok_s": "decode, tok/s"}


class Kept:
    """Files by what they hold. ValueError names one that is none of these. `folder` is that of the page, which links to
    them begin at."""

    def __init__(self, files: Sequence[Path], folder: Path) -> None:
        self._folder = folder
        self.rounds: dict[Path, list[Record]] = {}
        self.runs: dict[Path, list[Record]] = {}
        self.parity: dict[Path, Record] = {}
        for file in files:
            text = file.read_text(encoding="utf-8")
            lines = [record for line in text.splitlines() if (record := parse_line(line)) is not None]
            header = lines[0] if lines else {}
            if header.get("tool") == "engine-parity":
                self.parity[file] = json.loads(text)
            elif header.get("tool") == "bench-engine":
                self.runs[file] = lines
            elif header.get("kind") == "header" and "arms" in header:
                self.rounds[file] = lines
            else:
                raise ValueError(f"{file} is no record of rounds, bench-engine or engine-parity")

    def link(self, file: Path) -> str:
        return f"[{file.name}]({os.path.relpath(file, self._folder).replace(os.sep, '/')})"


def page(title: str, kept: Kept) -> Iterator[str]:
    yield from (f"# {title}", "", *_machine(kept))
    for file, records in kept.runs.items():
        yield from _run(kept.link(file), records)
    for file, records in kept.rounds.items():
        yield from _rounds(kept.link(file), records)
    if kept.rounds:
        yield from _decisions(kept)
    if kept.parity:
        yield from _parity(kept)


def _programs(kept: Kept) -> list[Record]:
    """Headers of bench-engine, one a file."""
    rounds = [of_kind(records, "header")[0].get("program") for records in kept.rounds.values()]
    return [each for each in (*rounds, *(records[0] for records in kept.runs.values())) if each]


def _commits(kept: Kept) -> str:
    return ", ".join(dict.fromkeys(commit_of(each) for each in _programs(kept))) or "unknown"


def _machine(kept: Kept) -> Iterator[str]:
    programs = _programs(kept)
    if not programs:
        return
    names = ("device", "driver", "cuda", "cpu", "python", "jax", "jaxlib", "numpy", "backend", "level", "dtype")
    started = [row["started"] for records in kept.rounds.values() for row in of_kind(records, "row")]
    times = sorted(time[:19] for time in (*started, *(each["time"] for each in programs)))
    yield from _table(
        ("what", "is"),
        [
            ("commit", _commits(kept)),
            ("taken", f"{times[0]} to {times[-1]} UTC"),
            *((name, ", ".join(dict.fromkeys(str(each.get(name)) for each in programs))) for name in names),
        ],
    )
    gated = [of_kind(records, "header")[0]["gate"]["on"] for records in kept.rounds.values()]
    if gated and not any(gated):
        yield from ("No process waited for a quiet host (`--no-gate`).", "")


def _run(link: str, records: Sequence[Record]) -> Iterator[str]:
    """Medians of the repeats of one process, with the rate of a copy in the same run."""
    header = records[0]
    yield from (f"## {header['model']}: one process", "")
    yield f"`{' '.join(header['argv'])}`, in {link}. Medians of the repeats."
    yield ""
    cells = []
    for each in of_kind(records, "summary"):
        share = each["percent_of_copy"]
        figures = [f"{each[name]['median']:.5g}" for name in ("ttft_ms", "decode_tok_s", "decode_tok_s_total")]
        copied = "–" if share is None else f"{share['median']:.1f} %"
        cells.append((
            each["path"], each["batch"], each["prompt_tokens"], each["kv_storage"], *figures,
            f"{each['ms_per_token']['median']:.4g}", f"{each['achieved_gb_s']['median']:.0f}", copied,
            each["note"] or "",
        ))  # fmt: skip
    heads = (
        "path",
        "rows",
        "prompt",
        "storage",
        "first token, ms",
        "tok/s a row",
        "tok/s in all",
        "ms a token",
        "GB/s",
    )
    yield from _table((*heads, "of a copy", "note"), cells)


def _rounds(link: str, records: Sequence[Record]) -> Iterator[str]:
    headers, summaries = of_kind(records, "header"), summarise(records)
    header, first = headers[0], headers[0]["arms"][0]["name"]
    yield from (f"## {header['model']}: {sum(each['rounds'] for each in headers)} rounds", "")
    yield f"Records in {link}; every arm has `{' '.join(header['extra'])}`, and"
    yield from ("", *(f"- {arm['name']}: `{' '.join(arm['flags'])}`" for arm in header["arms"]), "")
    yield f"Medians over the rounds with the least and the greatest; differences are from {first} in the same round."
    yield ""
    cells = []
    for each in (each for each in summaries if each["metric"] in UNITS):
        widest = each["widest_null_percent"]
        for arm, spread in each["arms"].items():
            delta = each["deltas"].get(arm) or each["nulls"].get(arm)
            apart = "" if delta is None else f"{delta['median']:+.2f} ({delta['min']:+.2f} … {delta['max']:+.2f})"
            agree = "" if delta is None else f"{delta['same_sign']} of {delta['rounds']}"
            within = None if delta is None else delta.get("within_noise")
            noise = "" if within is None else "yes" if within else "no"
            range_ = f"{spread['median']:.5g} ({spread['min']:.5g} … {spread['max']:.5g})"
            shown = "" if widest is None else f"{widest:.2f}"
            cells.append((
                each["path"], each["prompt_target_len"], UNITS[each["metric"]], arm, range_, apart, agree, shown, noise
            ))  # fmt: skip
    heads = ("path", "prompt", "figure", "arm", "median", "difference, %", "same sign", "noise, %", "within noise")
    yield from _table(heads, cells)
    if any(each["partial"] for each in summaries):
        yield from ("Not every process that was planned gave rows.", "")


def _decisions(kept: Kept) -> Iterator[str]:
    files = list(kept.rounds)
    links = {file.name: kept.link(file) for file in files}
    yield from ("## What they decide", "")
    heads = ("id", "record", "model, path, prompt, rows", "figure", "arms", "difference, %", "noise, %", "verdict")
    for decision in FIGURES:
        try:
            found = [line.strip("| \n").split(" | ") for line in rows(decision, files)]
        except (Refused, ValueError) as error:
            told = str(error)
            for file in files:
                told = told.replace(str(file), file.name)
            yield from (f"{decision}: not decided: {told}", "")
            continue
        yield from _table(heads, [(each[0], links[_name(each[1])], *each[2:]) for each in found])


def _name(link: str) -> str:
    return link[1 : link.index("]")]


def _parity(kept: Kept) -> Iterator[str]:
    """Of a tree without its history a record does not know the commit; the page does."""
    commit = _commits(kept)
    for file, report in kept.parity.items():
        known = commit if report["commit"] == "unknown" else report["commit"]
        groups = ", ".join(dict.fromkeys(row["group"] for row in report["pairs"]))
        yield from (f"## {report['model']}: bits ({groups})", "")
        yield (
            f"`mlxcel engine-parity`, record in {kept.link(file)}: {report['backend']} ({report['device']}, "
            f"{report['dtype']}, level {report['level']}), commit {known}, a prompt of "
            f"{report['prompt_tokens']} tokens, {report['n']} a stream, chunks of {report['chunks']}, a crowd of "
            f"{report['batch']}, exit code {report['exit_code']}."
        )
        yield ""
        yield from _table(
            ("case", "group", "left", "right", "result", "first difference", "other scores from"),
            [
                (
                    row["case"], row["group"], row["left"], row["right"], row["result"],
                    _or_dash(row["first_divergent_index"]), _or_dash(row["first_other_scores"]),
                )
                for row in report["pairs"]
            ],
        )  # fmt: skip
        yield from _table(
            ("case", "arm", "adopted", "pieces as executed", "storage", "launches", "rows of its steps"),
            [
                (
                    each["case"], each["arm"], "–".join(map(str, each["partition"]["adopted"])),
                    " ".join(f"{start}–{end}" for start, end, _ in each["partition"]["pieces"]), each["kv_storage"],
                    _launches(each["launches"]), "–".join(map(str, each["rows"])),
                )
                for each in report["streams"]
            ],
        )  # fmt: skip


def _launches(phases: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(
        f"{phase} {', '.join(f'{route} {count}' for route, count in routes.items())}"
        for phase, routes in phases.items()
    )


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _table(heads: Sequence[str], cells: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    yield from (f"| {' | '.join(map(str, row))} |" for row in cells)
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS")
    parser.add_argument("--title", required=True)
    parser.add_argument("--out", type=Path, required=True, help="the page")
    given = parser.parse_args()
    try:
        lines = page(given.title, Kept(given.records, given.out.parent))
        given.out.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
