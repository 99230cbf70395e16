"""benchmarks/decode.py, gpu_check.py and draws.py run, over toys on a CPU, and say what they are for."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FACTS = {"device", "driver", "machine", "python", "jax", "jaxlib", "numpy", "commit"}


def run(script, tmp_path, *arguments, small="--small", code=0):
    """The record of a run. The tree is enough: nothing has to be installed."""
    file = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--device", "cpu", "--commit", "abc123"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "typings")])
    done = subprocess.run(
        [*command, "--json", str(file), *small.split(), *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_decode_states_its_figures_beside_what_bounds_them(tmp_path):
    found = run("decode.py", tmp_path, "lone", "bare", "scheduler")
    assert set(found) >= FACTS
    assert found["commit"] == "abc123"
    assert not found["failed"]
    assert not found["left_out"]
    sections = found["sections"]
    read = next(row["gb_per_s"] for row in sections["bandwidth"] if row["what"] == "read")
    few, many, prompt, other = sections["lone"]
    assert (other["shape"], other["rows"], other["keys"]) == ("llama-3.1-8b", 1, 40)
    assert (few["rows"], few["keys"], many["keys"]) == (1, 40, 150)
    assert many["mb"] - few["mb"] == pytest.approx(110 * 2 * 2 * 16 * 4 / 1e6)  # keys, K and V, heads, d, float32
    assert few["gb_per_s"] == pytest.approx(few["mb"] / few["ms"])
    assert few["of_read"] == pytest.approx(few["gb_per_s"] / read)
    assert few["tok_per_s"] == pytest.approx(1e3 / few["ms"])
    assert few["ms_range"][0] <= few["ms"] <= few["ms_range"][1]
    assert prompt["what"] == "first token of 150"
    bare, engine, launches = sections["bare"]
    assert (bare["what"], bare["over_the_first"], engine["what"]) == ("bare step", 0, "engine")
    assert launches["launches"] == sum(launches["kinds"].values()) > 0
    assert launches["launches_a_layer"] == launches["launches"]
    assert [row["what"] for row in sections["scheduler"]] == ["engine", "scheduler"]


def test_decode_leaves_out_what_the_time_is_over_for(tmp_path):
    found = run("decode.py", tmp_path, "--seconds", "0", "lone")
    assert found["left_out"] == ["bandwidth", "lone llama-3.2-1b", "lone llama-3.1-8b"]
    assert found["sections"] == {"bandwidth": [], "lone": []}


@pytest.mark.slow
def test_decode_runs_every_section(tmp_path, check):
    """Shares are of the bandwidth that all rounds come to, those behind the last section too."""
    decode = check("decode")
    found = run("decode.py", tmp_path)
    assert not found["failed"]
    assert [row["requests"] for row in found["sections"]["concurrency"]] == [1, 3]
    assert [(row["rows"], row["keys"]) for row in found["sections"]["lone"] if "keys" in row] == [
        (1, 40),
        (1, 150),
        (1, 40),
    ]
    assert [row["rows"] for row in found["sections"]["batch"]] == [1, 2, 9, 1, 2, 9]
    assert [row["over_the_first"] for row in found["sections"]["batch"] if row["rows"] == 1] == [0, 0]
    read = found["sections"]["bandwidth"][0]
    assert read["rounds"] == 2 + len(decode.planned(decode.SMALL, decode.SMALL.shapes, decode.SECTIONS))
    shares = [(row["of_read"], row["gb_per_s"]) for rows in found["sections"].values() for row in rows if "mb" in row]
    assert shares
    assert all(share == pytest.approx(rate / read["gb_per_s"]) for share, rate in shares)
    cold, warm = found["sections"]["start"]
    assert cold["programs"] == warm["programs"] > 0


def test_decode_compiles_what_its_sections_need_and_measures_nothing(tmp_path):
    found = run("decode.py", tmp_path, "--compile-only", "--shapes", "llama-3.2-1b", "lone", "scheduler")["sections"]
    assert set(found) == {"lone", "scheduler"}
    assert [set(row) for row in found["lone"]] == [{"shape", "storage", "rows", "s"}]


def test_draws_are_timed_and_compared(tmp_path):
    found = run("draws.py", tmp_path, small="--vocab 300 --rows 2")
    assert [(row["rows"], row["set"]) for row in found["sections"]["times"]] == [(2, 1), (2, 2), (2, 3)]
    assert [row["differ"] for row in found["sections"]["same"]] == [0] * 5


def test_gpu_check_says_what_it_skips(tmp_path):
    found = run("gpu_check.py", tmp_path, "nan", "golden")["sections"]
    spoilt, watched = found["nan"]
    assert "NaN or +inf in its logits at position 20" in spoilt["said"]
    assert watched["said"] == f"{spoilt['said']}; first not finite in layer 0"
    assert found["golden"] == [{"skipped": "no --gguf"}]


@pytest.mark.slow
def test_gpu_check_runs_every_section(tmp_path):
    found = run("gpu_check.py", tmp_path)
    sections = found["sections"]
    rows = [row for section in sections.values() for row in section]
    assert not found["failed"]
    assert not found["left_out"]
    assert not any(row.get("wrong") for row in rows)
    ways = {"again", "another slot", "neighbours", "read at once", "paged"}
    assert {row["way"] for row in sections["same"]} == ways
    for section in ("deterministic", "r2"):
        assert "a prompt cache hit" in {row["way"] for row in sections[section]}
    assert sum(row["preempted"] for row in sections["schedules"]) > 0
    assert {row["steps"] for row in sections["steps"]} == {100}
    assert all(start["warm_up_s"] > 0 for start in found["starts"])


def test_gpu_check_runs_one_schedule_again(tmp_path):
    found = run("gpu_check.py", tmp_path, "--schedule", "2")
    assert [row["way"] for row in found["sections"]["schedules"]] == ["schedule 2"]


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_gpu_check_finds_an_error_above_its_bound(check, monkeypatch):
    """Float32 sums in another order, held to a bound that is far below one rounding."""
    engines, reference = check("check_engines"), check("check_reference")
    monkeypatch.setattr(reference, "ROUNDING", {"float32": 1e-9})
    sizes = attrs.evolve(engines.SMALL, shapes=(("llama-3.2-1b", 1),), prompts=(3,))
    opened = engines.CheckEngines(check("random_engines").prepare_jax("cpu"), "cpu", "auto")
    (row,) = reference.reference(engines.Checks(sizes, opened))
    assert row["wrong"]
    assert row["error"] > row["error_bound"]


def test_gpu_check_finds_one_bit(check):
    witness = check("witness")
    logits = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    other = logits.copy()
    other[1, 0] = np.nextafter(np.float32(3), np.float32(4))
    lone = witness.Seen((1, 1), logits)
    assert witness.difference(lone, witness.Seen((1, 1), logits.copy())) == ""
    said = witness.difference(lone, witness.Seen((1, 1), other))
    assert said.startswith("1 logits differ, first at step 1: id 0, 3.0 and 3.0000002")
    assert witness.difference(lone, witness.Seen((1, 0), logits)) == "ids differ from step 1 on"
