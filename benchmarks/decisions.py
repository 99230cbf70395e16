"""What rounds decide of the defaults D30, D31 and D32 (docs/spec/engine.md 9), as rows of ADR 0007's table.

    python benchmarks/decisions.py D30 RECORDS...    an arm that differs from the first in --prefill-chunk alone
    python benchmarks/decisions.py D31 RECORDS...    one that differs in --kv-storage alone: the first is dense
    python benchmarks/decisions.py D32 RECORDS...    any arms; nulls are what counts

RECORDS are files that engine_bench_rounds.py wrote, under docs/benchmark_results. The first arm is what is in force;
one file may decide several. A difference is the median of those of the rounds, in percent, of the other arm against the
first. What a null arm differs from its source by in any round is the noise of a cell and figure: a difference within it
decides nothing.

D30: the time to the first token. The other chunk wins if it is faster in a cell and slower in none. D31: decode rate
and time to the first token. Paged wins unless it is worse in a cell. D32: of each figure, with long prompts and with
short ones, the widest noise, rounded up to half a percent.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rounds.records import Refused, of_kind, read_records
from rounds.summary import summarise

from mlxcel.tools.regression import BETTER, LONG

ADR = Path(__file__).parent.parent / "docs/adr/0007-unified-batch-native-engine.md"
FLAG = {"D30": "--prefill-chunk", "D31": "--kv-storage"}
"""That two arms differ in."""
FIGURES = {"D30": ("ttft_ms",), "D31": ("ttft_ms", "decode_tok_s"), "D32": tuple(BETTER)}
STEP = 0.5
"""Percent that a threshold is a multiple of."""
ROUNDS = 5
"""Fewer decide nothing."""


def rows(decision: str, files: Sequence[Path]) -> list[str]:
    """A row a record, cell and figure, each with the verdict of all of them, of D32 of those of that figure and of as
    long prompts. ValueError for records that cannot decide it."""
    measured = [(file, each) for file in files for each in figures(decision, file)]

    def kind(figure: dict[str, Any]) -> tuple[Any, ...]:
        return (figure["figure"], figure["prompt"] >= LONG) if decision == "D32" else ()

    def decided(figure: dict[str, Any]) -> str:
        return verdict(decision, [each for _, each in measured if kind(each) == kind(figure)])

    return [_row(decision, file, each, decided(each)) for file, each in measured]


def figures(decision: str, file: Path) -> list[dict[str, Any]]:
    """Of one file: `where`, `prompt`, `figure`, `arms`, `delta` of the second of them against the first, `noise`, and
    the `values` of the flag that they differ in."""
    records = read_records(file)
    headers = of_kind(records, "header")  # one a call that added rounds
    header, rounds = headers[0], sum(each["rounds"] for each in headers)
    if rounds < ROUNDS or not header["nulls"]:
        raise ValueError(f"{file}: {rounds} rounds, {len(header['nulls'])} null arms; {ROUNDS} and 1 are needed")
    arms, values = [arm["name"] for arm in header["arms"]], ("", "")
    if decision in FLAG:
        arms, values = _apart(header["arms"], FLAG[decision], f"{file}: {decision}")
    found = []
    for each in summarise(records):
        if each["partial"] or each["widest_null_percent"] is None:
            raise ValueError(f"{file}: {each['path']}, {each['prompt_target_len']}: rounds are missing")
        if each["metric"] in FIGURES[decision]:
            found.append({
                "where": f"{header['model']}, {each['path']}, {each['prompt_target_len']}, {each['batch']}",
                "prompt": each["prompt_target_len"], "figure": each["metric"], "arms": arms, "values": values,
                "noise": each["widest_null_percent"],
                "delta": each["deltas"][arms[1]]["median"] if len(arms) > 1 else None,
            })  # fmt: skip
    return found


def _apart(arms: Sequence[dict[str, Any]], name: str, whose: str) -> tuple[list[str], tuple[str, str]]:
    """The first arm and the only one that differs from it in this flag and in no other, with both values of it."""
    first, *others = (_options(arm["flags"]) for arm in arms)
    rest = {option: value for option, value in first.items() if option != name}
    fitting = [
        place
        for place, flags in enumerate(others, 1)
        if {**rest, name: flags.get(name)} == flags and flags.get(name) not in (None, first.get(name))
    ]
    if name not in first or len(fitting) != 1:
        told = ", ".join(f"{arm['name']}: {' '.join(arm['flags'])!r}" for arm in arms)
        raise ValueError(f"{whose} needs one arm that differs from the first in {name} alone, there are {told}")
    place = fitting[0]
    return [arms[0]["name"], arms[place]["name"]], (first[name], others[place - 1][name])


def verdict(decision: str, found: Sequence[dict[str, Any]]) -> str:
    """The value that the default has from now on."""
    if decision == "D32":
        return f"{threshold([each['noise'] for each in found]):g}"
    gains = [BETTER[each["figure"]] * each["delta"] for each in found]
    beyond = [gain for gain, each in zip(gains, found, strict=True) if abs(gain) > each["noise"]]
    first, second = found[0]["values"]
    wins = not any(gain < 0 for gain in beyond) and (decision == "D31" or bool(beyond))
    return second if wins else first


def threshold(noise: Sequence[float]) -> float:
    """The widest, rounded up to STEP; one STEP at least."""
    return max(1, math.ceil(max(noise) / STEP)) * STEP


def _options(flags: Sequence[str]) -> dict[str, str]:
    """Values by flag; "" for a switch."""
    found: dict[str, str] = {}
    name = ""
    for word in flags:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            found[name] = value
        else:
            found[name] = word
    return found


def _row(decision: str, file: Path, figure: dict[str, Any], found: str) -> str:
    link = os.path.relpath(file, ADR.parent).replace(os.sep, "/")
    delta = "–" if figure["delta"] is None or decision == "D32" else f"{figure['delta']:+.2f}"
    cells = (
        decision, f"[{file.name}]({link})", figure["where"], figure["figure"], ", ".join(figure["arms"]), delta,
        f"{figure['noise']:.2f}", found,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decision", choices=sorted(FIGURES))
    parser.add_argument("records", nargs="+", type=Path)
    given = parser.parse_args()
    try:
        print("\n".join(rows(given.decision, given.records)))
    except (Refused, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
