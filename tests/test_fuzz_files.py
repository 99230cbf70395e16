"""Damaged checkpoint files by the thousand: each is read, or refused in words, at a bounded cost (tests/fuzz_law.py).

A failure names its cases: `python tests/fuzz_law.py CASE 1 FOLDER` damages and reads that one again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import fuzz_law
import pytest
from fuzz_files import gguf_atoms, gguf_bytes
from fuzz_seeds import make_seeds

QUICK, SLOW = 2_000, 200_000
PARTS = 10  # of the slow run, for the workers to share
STUCK = 570
"""Seconds of the clock for one process: the timer of CPU time does not see one that sleeps for ever."""

LIMITS = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}
"""Threads and their arenas reserve address space that nobody uses, and a backtrace reads the symbols of a library."""


def fuzz(first: int, count: int, folder: Path, program: tuple[str, ...] = (fuzz_law.__file__,)) -> dict[str, Any]:
    """The record of a process of its own. Fails with the case in hand when the process ended by itself."""
    command = [sys.executable, "-W", "error", *program, str(first), str(count), str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **LIMITS}, capture_output=True, text=True, check=False, timeout=STUCK
    )
    case = (folder / fuzz_law.STATUS).read_text().strip() if (folder / fuzz_law.STATUS).exists() else "no"
    if done.returncode:
        raise AssertionError(f"case {case} ended the process with {done.returncode}: {done.stderr[-3000:]}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def obeyed(record: dict[str, Any], count: int) -> Counter[str]:
    broken = [f"{wrong['case']}, {wrong['file']} of {wrong['seed']}: {wrong['where']}" for wrong in record["broken"]]
    assert not broken, f"{record['counts']['broken']} of {count} cases broke the law, such as case " + "\n".join(broken)
    return Counter(record["counts"])


@pytest.mark.parametrize("part", range(2))
def test_damaged_files_are_read_or_refused(tmp_path: Path, part: int) -> None:
    """docs/spec/clients.md 1.10, test 10, and docs/spec/engine.md T21, for both formats."""
    count = QUICK // 2
    counts = obeyed(fuzz(part * count, count, tmp_path), count)
    # Neither so tame that all is read, nor so wild that nothing comes past the first check.
    assert counts["whole"] > count // 10
    assert counts["open"] > count // 10
    for stage in ("config", "tokenizer", "template", "ends"):
        assert counts[stage], f"nothing was refused by the stage {stage}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_damaged_files_are_read_or_refused(tmp_path: Path, part: int) -> None:
    count = SLOW // PARTS
    obeyed(fuzz(part * count, count, tmp_path), count)


# --- the fuzzer itself -----------------------------------------------------------------------------------------------


def test_undamaged_files_are_read_whole(tmp_path: Path) -> None:
    chain = fuzz_law.Chain()
    for seed in make_seeds(tmp_path / "seeds").all:
        fuzz_law.lay_out(seed, tmp_path / seed.name)
        assert chain(tmp_path / seed.name / seed.opened, Random(0), True) == set(), seed.name


def test_a_case_is_the_same_damage_in_every_run(tmp_path: Path) -> None:
    def damage(seeds: Any, case: int) -> tuple[str, str, bytes]:
        draw = Random(case)
        seed = seeds.of(case, draw)
        return seed.name, *seed.damaged(draw)

    one, other = make_seeds(tmp_path / "one"), make_seeds(tmp_path / "other")
    backwards = [damage(other, case) for case in reversed(range(300))]
    assert [damage(one, case) for case in range(300)] == backwards[::-1]


def test_nearly_every_case_is_other_bytes(tmp_path: Path) -> None:
    seeds = make_seeds(tmp_path)
    seen = set()
    for case in range(500):
        draw = Random(case)
        seed = seeds.of(case, draw)
        target, data = seed.damaged(draw)
        seen.add((seed.name, target, data))
    assert len(seen) > 480


def test_fields_of_a_gguf_file_make_the_file_again(tmp_path: Path) -> None:
    for seed in make_seeds(tmp_path).all:
        if seed.atoms:
            data = seed.files[seed.opened]
            assert gguf_bytes(gguf_atoms(data)).rstrip(b"\0") == data.rstrip(b"\0")


FAULTS = {
    "{}['x']": "KeyError",
    "raise BaseException('a panic')": "BaseException",
    "__import__('warnings').warn('overflow')": "UserWarning",
    "__import__('logging').info('%d', 'no number')": "TypeError",
    "bytearray(fuzz_law.FLOOR + (1 << 21))": "MemoryError",
    "__import__('numpy').empty(1 << 33, 'u1')": "MemoryError",
    "[bytes(1000) for _ in range(1 << 20)]": "MemoryError",
}
PLANTED = """
import itertools, json, os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import fuzz_law
fuzz_law.SECONDS = 0.5
undamaged = len(fuzz_law.make_seeds(Path(sys.argv[3]) / "again").all)
calls = itertools.count(-undamaged)
def use(path, draw, all_of_it):
    call = next(calls)
    if call >= 0:
        exec(compile({faults!r}[call], f"fault {{call}}", "exec"))
    return set()
print(json.dumps(fuzz_law.run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), use)))
"""


def planted(faults: list[str], folder: Path) -> dict[str, Any]:
    """The record of as many cases as faults, from case 7 on, whose readers have them."""
    program = folder / "planted.py"
    program.write_text(PLANTED.format(tests=str(Path(fuzz_law.__file__).parent), faults=faults))
    return fuzz(7, len(faults), folder, (str(program),))


def test_faults_are_seen(tmp_path: Path) -> None:
    record = planted([*FAULTS, "pass"], tmp_path)
    assert record["counts"] == {"broken": len(FAULTS), "whole": 1}
    assert [wrong["case"] for wrong in record["broken"]] == list(range(7, 7 + len(FAULTS)))
    for wrong, error in zip(record["broken"], FAULTS.values(), strict=True):
        assert error in wrong["where"], wrong


@pytest.mark.parametrize("fault", ["os.abort()", "__import__('re').match('(a+)+$', 'a' * 60 + 'b')"])
def test_what_ends_or_holds_the_process_is_seen(tmp_path: Path, fault: str) -> None:
    with pytest.raises(AssertionError, match="case 8 ended the process"):
        planted(["pass", fault], tmp_path)


def test_memory_that_is_not_there_may_not_hide_behind_a_refusal() -> None:
    from mlxcel.errors import CheckpointError

    try:
        try:
            raise MemoryError
        except MemoryError as error:
            raise CheckpointError("too large") from error
    except CheckpointError as error:
        with pytest.raises(MemoryError):
            fuzz_law.refuse_hidden(error)
