"""From options to rows: every arm once, one engine alive at a time."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final

import attrs

from mlxcel.tools.garbage import settled_objects
from mlxcel.tools.machine import Source, source
from mlxcel.tools.parity.arms import arms
from mlxcel.tools.parity.pairs import Row, exit_code, letters, rows
from mlxcel.tools.parity.running import ArmRun, run_arm
from mlxcel.tools.parity.setup import EngineFacts, Setup
from mlxcel.tools.parity.stream import Failed, Found, Missing, NotAvailable, Stream

log = logging.getLogger("mlxcel.parity")

_WIDE: Final = frozenset(("F32", "F16", "BF16", "float32", "float16", "bfloat16"))
"""Types of weights that are not quantised, by the names that checkpoints have for them."""


@attrs.frozen(eq=False)
class Report:
    """What was found. `found` is by case and arm's letter, `names` are those of the arms that were to run."""

    setup: Setup
    source: Source
    facts: EngineFacts
    names: dict[str, str]
    found: dict[tuple[str, str], Found]
    rows: list[Row]
    gap_bound: float
    exit_code: int

    def stream(self, case: str, arm: str) -> Stream | None:
        """Of an arm by its name; None where it has none."""
        letter = next(letter for letter, name in self.names.items() if name == arm)
        found = self.found[case, letter]
        return found if isinstance(found, Stream) else None


def run_parity(setup: Setup, groups: Sequence[str], other: tuple[str, str] | None, other_name: str) -> Report:
    """Run the arms of these groups. `other` is the second backend and its device, None where there is none here;
    `other_name` is what it is called then. What keeps the very first engine from being opened is raised."""
    options, code_ran = setup.options, source()
    made = arms(options, other or (other_name, setup.config.device))
    found: dict[tuple[str, str], Found] = {}
    facts: dict[str, EngineFacts] = {}
    with settled_objects(), closing(setup.kept):
        for letter in letters(groups):
            arm, began = made[letter], time.monotonic()
            setup.say(f"running {arm.name}")
            if arm.other:
                setup.kept.close()
            if arm.other and other is None:
                run = ArmRun(dict.fromkeys(options.cases, Missing(NotAvailable.BACKEND_UNAVAILABLE)))
            else:
                try:
                    # What is told of the first engine holds for those behind it.
                    say = log.info if facts and not arm.other else setup.say
                    run = run_arm(arm, setup, _to_score(letter, groups, found, options.cases), say=say)
                except Exception as error:
                    if not facts:
                        raise
                    run = ArmRun(dict.fromkeys(options.cases, Failed(f"{type(error).__name__}: {error}")))
            gc.collect()  # an engine's arrays are gone before the next one's are made
            log.info("%s: %.2f s, of them %s", arm.name, time.monotonic() - began, _seconds(run))
            found |= {(case, letter): each for case, each in run.found.items()}
            if run.facts is not None:
                facts[letter] = run.facts
            for case, each in run.found.items():
                if isinstance(each, Failed):
                    setup.say(f"{arm.name} failed, {case}: {each.message}")
    main = next(each for letter, each in facts.items() if not made[letter].other)
    bound = options.gap_bound if options.gap_bound is not None else _bound(list(facts.values()))
    names = {letter: made[letter].name for letter in letters(groups)}
    table = rows(options.cases, groups, names, found, bound)
    code = exit_code(table, require=options.require, expect_identical=options.expect_identical)
    return Report(setup, code_ran, main, names, found, table, bound, code)


def _seconds(run: ArmRun) -> str:
    streams = {case: each for case, each in run.found.items() if isinstance(each, Stream)}
    return ", ".join(f"{case} {each.ms / 1000:.2f} s" for case, each in streams.items()) or "none for a stream"


def _to_score(
    letter: str, groups: Sequence[str], found: dict[tuple[str, str], Found], cases: Sequence[str]
) -> dict[str, tuple[int, ...]] | None:
    """Streams that an arm's backend scores: those of the direct client, which itself has its own."""
    if "backend" not in groups or letter not in ("a", "x"):
        return None
    left = {case: found.get((case, "a")) for case in cases}
    return {case: stream.token_ids for case, stream in left.items() if isinstance(stream, Stream)}


def _bound(facts: Sequence[EngineFacts]) -> float:
    """Nats by which two backends may differ, by the narrowest type that one of them computes with."""
    exact = all(each.dtype == "float32" and each.quantisation in _WIDE for each in facts)
    return 0.001 if exact else 0.1
