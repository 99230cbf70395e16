"""Rounds against those of an earlier file."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds.records import Record, Refused, of_kind
from rounds.summary import summarise
from rounds.tables import cell_words

RULE = Path(__file__).parent.parent.parent / "mlxcel" / "tools" / "regression.py"
"""The one place of the thresholds. It needs the standard library alone; importing it by its name would need mlxcel."""


@dataclass(frozen=True)
class Rule:
    """The metrics that count, what each may lose with a prompt of so many tokens and what it did, in percent; and all
    that they may, in words."""

    metrics: tuple[str, ...]
    most: Callable[[str, int], float]
    words: str
    loss: Callable[[str, float, float], float]


def rule() -> Rule:
    found = runpy.run_path(str(RULE))
    return Rule(tuple(found["BETTER"]), found["may_lose"], found["allowed"](), found["loss_percent"])


def compare(base: Sequence[Record], records: Sequence[Record]) -> int:
    """Printed; 1 if more than a threshold is lost anywhere, else 0."""
    known = rule()
    found = beside(base, records, known)
    print(*other_extra(base, records), *comparison_lines(found, known), sep="\n", flush=True)
    return int(any(each.lost for each in found))


def check_plan(base: Sequence[Record], now: Record) -> None:
    """`now` is a header. Refused where the earlier rounds had other arms or cells."""
    earlier = of_kind(base, "header")[0]
    theirs = {arm["name"]: arm["flags"] for arm in earlier["arms"]}
    for arm in now["arms"]:
        name, flags = arm["name"], arm["flags"]
        if name not in theirs:
            raise Refused(f"the earlier rounds have no arm {name!r}: they have {', '.join(theirs)}")
        if flags != theirs[name]:
            raise Refused(f"the arm {name!r} is another: {' '.join(flags)!r} now, {' '.join(theirs[name])!r} earlier")
    if missing := [str(length) for length in now["prompt_tokens"] if length not in earlier["prompt_tokens"]]:
        raise Refused(f"the earlier rounds have no prompt of {', '.join(missing)} tokens")
    if earlier["max_tokens"] != now["max_tokens"]:
        raise Refused(f"--max-tokens is {now['max_tokens']}, and was {earlier['max_tokens']} in the earlier rounds")


def check_place(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refused for headers of another device or model."""
    for name in ("device", "model"):
        if earlier.get(name) != now.get(name):
            raise Refused(f"another {name}: {now.get(name)} now, {earlier.get(name)} in the earlier rounds")


@dataclass(frozen=True)
class Beside:
    """Medians of one cell, metric and arm. `loss` is in percent, below 0 for a gain; `lost`: it counts."""

    cell: str
    metric: str
    arm: str
    before: float
    now: float
    loss: float
    lost: bool


def beside(base: Sequence[Record], records: Sequence[Record], rule: Rule) -> list[Beside]:
    """Of every arm that is no null arm. Refused where the earlier rounds have no such median."""
    earlier = {(cell_words(record), record["metric"]): record["arms"] for record in summarise(base)}
    nulls = {null["name"] for null in of_kind(records, "header")[0]["nulls"]}
    found = []
    for record in summarise(records):
        if record["metric"] not in rule.metrics:
            continue
        for arm, spread in record["arms"].items():
            if arm in nulls:
                continue
            known = earlier.get((cell_words(record), record["metric"]), {}).get(arm)
            if known is None or not known["median"]:
                raise Refused(f"the earlier rounds have no {record['metric']} of {arm!r}: {cell_words(record)}")
            before, now = known["median"], spread["median"]
            loss = rule.loss(record["metric"], before, now)
            lost = loss > rule.most(record["metric"], record["prompt_target_len"])
            found.append(Beside(cell_words(record), record["metric"], arm, before, now, loss, lost))
    return found


def other_extra(base: Sequence[Record], records: Sequence[Record]) -> Iterator[str]:
    """Flags of every arm may be others, such as --repeats; a reader has to know."""
    before, now = (" ".join(of_kind(each, "header")[0]["extra"]) for each in (base, records))
    if before != now:
        yield f"note: --extra is {now!r}, and was {before!r} in the earlier rounds"


def comparison_lines(found: Sequence[Beside], rule: Rule) -> Iterator[str]:
    yield f"against the earlier rounds; a loss counts of more than {rule.words}"
    for each in found:
        verdict = "LOST" if each.lost else "held"
        change = f"{abs(each.loss):.2f} % {'worse' if each.loss > 0 else 'better'}"
        yield f"  {verdict}  {each.cell}: {each.metric} of {each.arm}: {each.now:.5g}, was {each.before:.5g}, {change}"
