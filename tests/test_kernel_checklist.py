"""benchmarks/kernels/checklist.py: what a run on a GPU leaves when its time is over, or when a check fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
KERNELS = Path(__file__).parent.parent / "benchmarks" / "kernels"

HANGS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import checklist
from pathlib import Path

whole, most = map(float, sys.argv[3:])
checklist.OVER_S = whole / 2

def hang():
    yield {"n": 1}
    time.sleep(600)

checks = [checklist.Check("a", "hangs", hang), checklist.Check("a", "never", list)]
checklist.Checklist({}, Path(sys.argv[2]), whole / 2).run(checks, most)
"""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS))


def test_rows_are_written_as_they_come_and_a_check_that_fails_is_no_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from checklist import Check, Checklist

    file, states = tmp_path / "record.json", []

    def first() -> Iterator[dict[str, Any]]:
        yield {"n": 1}
        states.append(json.loads(file.read_text()))
        raise ValueError("too much")

    found = Checklist({"gpu": "x"}, file, 60)
    assert not found.run([Check("a", "one", first), Check("a", "two", lambda: [{"n": 2}, {"n": 3}])], 60)
    (state,) = states
    assert (state["gpu"], state["a"], state["left_out"]) == ("x", [{"n": 1}], ["a: one", "a: two"])
    record = json.loads(file.read_text())
    assert record == found.record
    assert record["a"] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert record["failed"] == {"a: one": "ValueError: too much"}
    assert set(record["seconds"]) == {"a: one", "a: two"}
    assert record["left_out"] == []
    assert "left out: nothing" in capfd.readouterr().out


def test_no_check_begins_behind_the_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from checklist import Check, Checklist

    found = Checklist({}, tmp_path / "record.json", 0)
    assert found.run([Check("a", "one", lambda: [{"n": 1}]), Check("b", "two", list)], 60)
    assert json.loads((tmp_path / "record.json").read_text())["left_out"] == ["a: one", "b: two"]
    assert "left out: a: one; b: two" in capfd.readouterr().out


@pytest.mark.parametrize(("ends", "said"), [("whole", "left out: a: hangs; a: never"), ("most", "Timeout (0:00:")])
def test_a_check_that_hangs_is_ended_and_what_it_found_is_kept(ends: str, said: str, tmp_path: Path) -> None:
    """By the time that all have, or by that of one."""
    file, found = tmp_path / "record.json", []
    for seconds in ("0.2", "2", "8", "32"):  # a busy machine may not have found anything in less
        times = [seconds if ends == name else "600" for name in ("whole", "most")]
        done = subprocess.run(
            [sys.executable, "-c", HANGS, str(KERNELS), str(file), *times], capture_output=True, text=True
        )
        assert done.returncode != 0
        record = json.loads(file.read_text()) if file.exists() else {}
        if found := record.get("a", []):
            break
    assert said in done.stdout + done.stderr
    assert (found, record["left_out"]) == ([{"n": 1}], ["a: hangs", "a: never"])


def test_programs_that_were_compiled_side_by_side_are_found() -> None:
    import jax
    import jax.numpy as jnp
    from checklist import compile_all

    compiled: list[str] = []

    def heard(event: str, duration_secs: float, **_: str | int) -> None:
        compiled.append(event)

    double = jax.jit(lambda x: x * 2.5)
    arguments = [jnp.ones((size,)) for size in (3, 5, 7)]
    assert all(x.block_until_ready() is x for x in arguments)
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        assert len(compile_all(double.lower(x) for x in arguments)) == 3
        before = len([name for name in compiled if name.endswith("backend_compile_duration")])
        assert [double(x).tolist() for x in arguments] == [[2.5] * 3, [2.5] * 5, [2.5] * 7]
        assert len([name for name in compiled if name.endswith("backend_compile_duration")]) == before == 3
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
