"""The decision records: their index, the copy of the defaults' table, and the rows that measurements decide
(docs/spec/engine.md 9: D30 to D33)."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_rows import written
from parameter_tables import lines

from mlxcel.config import EngineConfig
from mlxcel.memory_plan import storage_name
from mlxcel.options import BY_NAME
from mlxcel.tools.regression import BETTER, LONG, may_lose

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/adr"
ADR = FOLDER / "0007-unified-batch-native-engine.md"


@pytest.fixture(scope="module")
def decisions() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("decisions")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def in_force() -> dict[str, set[tuple[str, str]]]:
    """Of each decision what is in force; of D32 by figure and prompt."""
    config = EngineConfig.resolve({}, environ={"HOME": "/nowhere"})
    found = {
        "D30": str(BY_NAME["prefill_chunk"].default),
        "D31": storage_name(config, 1),
        "D33": str(BY_NAME["prefill_chunk_busy"].default),
    }
    of_figures = {(f"{figure} of {n}", f"{may_lose(figure, n):g}") for figure in BETTER for n in (256, 8192)}
    return {**{row: {("", value)} for row, value in found.items()}, "D32": of_figures}


# --- the pages --------------------------------------------------------------------------------------------------------


def test_the_index_lists_every_decision_by_its_title() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+) \|$", index, re.MULTILINE)
    pages = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
    assert [name for _, name, _ in found] == [page.name for page in pages]
    for (number, name, title), page in zip(found, pages, strict=True):
        assert name.startswith(f"{number}-")
        assert page.read_text(encoding="utf-8").splitlines()[0] == f"# {number}. {title}"


def test_the_copy_of_the_defaults_is_the_specifications() -> None:
    copied = ADR.read_text(encoding="utf-8").split("## The defaults", 1)[1].split("## Measured")[0]
    ours = [line for line in copied.splitlines() if line.startswith("| D")]
    theirs = [line for line in (ROOT / "docs/spec/engine.md").read_text().splitlines() if line.startswith("| D")]
    assert len(ours) == 33
    assert ours == theirs
    assert all(cells[4] not in ("", "–") for cells in lines("engine.md", "## 9. Defaults"))


# --- measured rows ----------------------------------------------------------------------------------------------------


def measured() -> list[list[str]]:
    """The cells of each row under *Measured*."""
    text = ADR.read_text(encoding="utf-8").split("## Measured", 1)[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| D")]
    assert {len(row) for row in rows} == {8}
    return rows


@pytest.mark.parametrize("row", ["D30", "D31", "D32", "D33"])
def test_the_code_holds_to_the_verdicts(row: str) -> None:
    """D30 to D33, whose values the specification names."""
    verdicts = {
        (f"{cells[3]} of {cells[2].split(', ')[2]}" if row == "D32" else "", cells[7])
        for cells in measured()
        if cells[0] == row
    }
    assert verdicts == in_force()[row]
    told = next(line for line in lines("engine.md", "## 9. Defaults") if line[0] == row)
    records = {cells[1] for cells in measured() if cells[0] == row}
    assert "not measured yet" not in records
    assert "to be decided" not in told[2]
    unit = " %" if row == "D32" else ""
    assert all(re.search(rf"(?<![\w.]){value}{unit}(?![\w.])", told[2]) for _, value in verdicts), told[2]


@pytest.mark.parametrize("row", ["D30", "D31", "D32"])
def test_measured_rows_are_what_their_records_say(decisions: Any, row: str) -> None:
    """D30 to D32: the record is there, names its null arms, and gives these very figures and this verdict."""
    ours = [cells for cells in measured() if cells[0] == row]
    links = dict.fromkeys(re.fullmatch(r"\[[^]]+\]\(([^)]+)\)", cells[1])[1] for cells in ours)  # type: ignore[index]
    files = [(FOLDER / link).resolve() for link in links]
    assert all(file.is_file() and file.is_relative_to(ROOT / "docs/benchmark_results") for file in files)
    assert [f"| {' | '.join(cells)} |" for cells in ours] == decisions.rows(row, files)


def test_the_record_of_the_busy_chunk_is_there() -> None:
    """D33."""
    (cells,) = [cells for cells in measured() if cells[0] == "D33"]
    link = re.fullmatch(r"\[[^]]+\]\(([^)]+)\)", cells[1])
    assert link is not None
    assert (FOLDER / link[1]).is_file()


# --- what rounds decide -----------------------------------------------------------------------------------------------


def rounds(
    flags: tuple[str, ...],
    deltas: dict[int, tuple[float, float]],
    noise: float = 0.4,
    count: int = 5,
    steadier: float = 1,
) -> list[dict[str, Any]]:
    """Records of `count` rounds: of each prompt the difference of the second arm in percent, of the time to the first
    token and of the rate; a null arm that differs by at most `noise`, its rate by so many times less."""
    arms = [{"name": f"arm{place}", "flags": flag.split()} for place, flag in enumerate(flags)]
    nulls = [{"name": "arm0-null", "source": "arm0", "flags": arms[0]["flags"]}]
    records: list[dict[str, Any]] = [
        {
            "kind": "header",
            "bin": ["b"],
            "model": "m",
            "rounds": count,
            "arms": arms,
            "nulls": nulls,
            "prompt_tokens": [*deltas],
            "max_tokens": 128,
            "extra": [],
        },
    ]
    for turn in range(count):
        swing = 1 + noise / 100 * (turn - 2) / 2  # from -noise to +noise
        for name in [*(arm["name"] for arm in arms), "arm0-null"]:
            for prompt, (first, rate) in deltas.items():
                changed = {
                    "arm1": (1 + first / 100, 1 + rate / 100),
                    "arm0-null": (swing, 1 + (swing - 1) / steadier),
                }.get(name, (1, 1))
                records.append({
                    "kind": "row", "arm": name, "round": turn, "exit_code": 0, "path": "scheduler", "batch": 1,
                    "prompt_target_len": prompt, "ttft_ms": 50 * changed[0], "decode_tok_s": 800 * changed[1],
                    "ms_per_token": 1.25 / changed[1],
                })  # fmt: skip
    return records


CHUNKS = ("--prefill-chunk 2048", "--prefill-chunk 512")
STORES = ("--kv-storage dense", "--kv-storage=paged")


@pytest.mark.parametrize(
    ("row", "flags", "deltas", "verdict"),
    [
        ("D30", CHUNKS, {256: (0.3, 0), 8192: (0.2, 0)}, "2048"),
        ("D30", CHUNKS, {256: (0.3, 0), 8192: (-3.0, 0)}, "512"),
        ("D30", CHUNKS, {256: (2.0, 0), 8192: (-3.0, 0)}, "2048"),
        ("D30", CHUNKS, {256: (0.1, -9.0), 8192: (-1.0, -9.0)}, "512"),
        ("D31", STORES, {256: (0.3, -0.3), 8192: (0.1, 0.2)}, "paged"),
        ("D31", STORES, {256: (0.3, -0.3), 8192: (0.1, -0.5)}, "dense"),
        ("D31", STORES, {256: (0.6, 2.0), 8192: (0.1, 2.0)}, "dense"),
    ],
)
def test_the_better_option_wins_beyond_the_noise(
    decisions: Any, tmp_path: Path, row: str, flags: tuple[str, str], deltas: dict[int, Any], verdict: str
) -> None:
    file = tmp_path / "records.jsonl"
    written(file, *rounds(flags, deltas))
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in decisions.rows(row, [file])]
    assert {cells[7] for cells in found} == {verdict}
    assert len(found) == len(deltas) * (1 if row == "D30" else 2)
    first = found[0]
    assert (first[0], first[2], first[3], first[4]) == (row, "m, scheduler, 256, 1", "ttft_ms", "arm0, arm1")
    assert (float(first[5]), float(first[6])) == (deltas[256][0], 0.4)


def test_one_file_decides_what_its_arms_are_apart_in(decisions: Any, tmp_path: Path) -> None:
    """Three arms: the second has another chunk, the third another storage."""
    file = tmp_path / "records.jsonl"
    base = "--kv-storage dense --prefill-chunk 2048"
    flags = (base, "--prefill-chunk=512 --kv-storage=dense", "--kv-storage paged --prefill-chunk 2048")
    written(file, *rounds(flags, {256: (-3.0, 0)}))
    found = {
        row: [cell.strip() for cell in decisions.rows(row, [file])[0].split("|")[1:-1]] for row in ("D30", "D31", "D32")
    }
    assert (found["D30"][4], found["D30"][5], found["D30"][7]) == ("arm0, arm1", "-3.00", "512")
    assert (found["D31"][4], found["D31"][5], found["D31"][7]) == ("arm0, arm2", "+0.00", "paged")
    assert found["D32"][5:] == ["–", "0.40", "0.5"]


def test_a_threshold_is_the_widest_null_difference_of_its_figure_rounded_up(decisions: Any, tmp_path: Path) -> None:
    """Long prompts have thresholds of their own."""
    files = []
    for prompt, noise in ((LONG - 1, 0.4), (256, 1.2), (LONG, 2.4), (8192, 0.2)):
        files.append(tmp_path / f"{prompt}.jsonl")
        written(files[-1], *rounds(("",), {prompt: (0, 0)}, noise, steadier=2))
    lines = decisions.rows("D32", files)
    assert [line.split("|")[-2].strip() for line in lines] == [*["1.5", "1"] * 2, *["2.5", "1.5"] * 2]
    noises = [line.split("|")[-3].strip() for line in lines]
    assert noises == ["0.40", "0.20", "1.20", "0.60", "2.40", "1.20", "0.20", "0.10"]
    assert [decisions.threshold([noise]) for noise in (0.0, 0.5, 0.51, 3.0)] == [0.5, 0.5, 1.0, 3.0]


@pytest.mark.parametrize(
    ("row", "flags", "count", "words"),
    [
        ("D30", CHUNKS, 4, "4 rounds"),
        ("D30", STORES, 5, "D30 needs one arm that differs from the first in --prefill-chunk alone"),
        (
            "D31",
            ("--kv-storage dense", "--kv-storage dense"),
            5,
            "in --kv-storage alone, there are arm0: '--kv-storage",
        ),
        ("D31", ("--kv-storage dense", "--kv-storage paged --dtype float32"), 5, "in --kv-storage alone"),
    ],
)
def test_records_that_cannot_decide_it_are_refused(
    decisions: Any, tmp_path: Path, row: str, flags: tuple[str, str], count: int, words: str
) -> None:
    file = tmp_path / "records.jsonl"
    written(file, *rounds(flags, {256: (0, 0)}, count=count))
    with pytest.raises(ValueError, match=words):
        decisions.rows(row, [file])


def test_a_file_that_is_none_is_refused(
    decisions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["decisions.py", "D32", str(tmp_path / "missing")])
    assert decisions.main() == 2
    assert "missing cannot be read" in capsys.readouterr().err


def test_records_that_lack_a_round_are_refused(decisions: Any, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    written(file, *rounds(CHUNKS, {256: (0, 0)})[:-1])
    with pytest.raises(ValueError, match="rounds are missing"):
        decisions.rows("D30", [file])
