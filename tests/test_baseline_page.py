"""benchmarks/baseline_page.py: what a page of a baseline says is what its records hold."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from engine_bench_rounds_fake import BENCHMARKS

PROGRAM = {
    "kind": "header", "tool": "bench-engine", "commit": "unknown", "label": "abc1234", "device": "GPU", "model": "m",
    "time": "2026-11-30T17:00:00+00:00", "argv": ["bench-engine", "m"], "backend": "b", "level": "R2", "dtype": "bf16",
}  # fmt: skip
BASE, OTHER = ["--prefill-chunk", "2048"], ["--prefill-chunk", "512"]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("baseline_page")


def rounds(file: Path, count: int = 5) -> Path:
    arms = [{"name": "base", "flags": BASE}, {"name": "small", "flags": OTHER}]
    header = {
        "kind": "header", "bin": ["b"], "model": "m", "rounds": count, "arms": arms, "program": PROGRAM,
        "nulls": [{"name": "base-null", "source": "base", "flags": BASE}], "prompt_tokens": [256], "max_tokens": 128,
        "extra": ["--repeats", "2"], "gate": {"on": False},
    }  # fmt: skip
    rows = [
        {
            "kind": "row", "arm": arm, "round": turn, "exit_code": 0, "path": "direct", "batch": 1,
            "started": f"2026-11-30T17:0{turn}:30.123+00:00", "prompt_target_len": 256, "ttft_ms": ms,
            "decode_tok_s": 500.0, "ms_per_token": 2.0,
        }
        for turn in range(count)
        for arm, ms in (("base", 50.0), ("small", 40.0), ("base-null", 50.4))
    ]  # fmt: skip
    file.write_text("".join(json.dumps(each) + "\n" for each in [header, *rows]))
    return file


def single(file: Path) -> Path:
    spread = {"median": 3.0, "min": 2.0, "max": 4.0}
    names = ("ttft_ms", "decode_tok_s", "decode_tok_s_total", "ms_per_token", "achieved_gb_s")
    summary = {
        "kind": "summary", "path": "scheduler", "batch": 8, "prompt_tokens": 256, "kv_storage": "paged", "note": None,
        **dict.fromkeys(names, spread), "percent_of_copy": {"median": 61.25},
    }  # fmt: skip
    file.write_text("".join(json.dumps(each) + "\n" for each in [PROGRAM, summary]))
    return file


def parity(file: Path) -> Path:
    pair = {
        "case": "greedy", "group": "client", "left": "a:direct", "right": "b:dense", "result": "diverge",
        "first_divergent_index": 17, "first_other_scores": None,
    }  # fmt: skip
    stream = {
        "case": "greedy", "arm": "e:hit", "partition": {"adopted": [0, 75], "pieces": [[75, 96, 0], [96, 100, 28]]},
        "kv_storage": "paged", "launches": {"decode": {"paged": 15}}, "rows": [1, 2],
    }  # fmt: skip
    report = {
        "tool": "engine-parity", "model": "m", "backend": "b", "device": "GPU", "dtype": "bf16", "level": "R2",
        "commit": "unknown", "prompt_tokens": 100, "n": 16, "chunks": [32, 64], "batch": 4, "exit_code": 1,
        "pairs": [pair], "streams": [stream],
    }  # fmt: skip
    file.write_text(json.dumps(report))
    return file


def test_a_page_has_what_its_records_hold(tool: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    files = [rounds(data / "r.jsonl"), single(tmp_path / "s.jsonl"), parity(data / "p.json")]
    text = "\n".join(tool.page("A title", tool.Kept(files, tmp_path)))
    lines = text.splitlines()
    assert lines[0] == "# A title"
    for line in (
        "| commit | abc1234 |",
        "| taken | 2026-11-30T17:00:00 to 2026-11-30T17:04:30 UTC |",
        "## m: 5 rounds",
        "- small: `--prefill-chunk 512`",
        "| direct | 256 | first token, ms | base | 50 (50 … 50) |  |  | 0.80 |  |",
        "| direct | 256 | first token, ms | small | 40 (40 … 40) | -20.00 (-20.00 … -20.00) | 5 of 5 | 0.80 | no |",
        "| D30 | [r.jsonl](data/r.jsonl) | m, direct, 256, 1 | ttft_ms | base, small | -20.00 | 0.80 | 512 |",
        "| D32 | [r.jsonl](data/r.jsonl) | m, direct, 256, 1 | ttft_ms | base, small | – | 0.80 | 1 |",
        "| scheduler | 8 | 256 | paged | 3 | 3 | 3 | 3 | 3 | 61.2 % |  |",
        "| greedy | client | a:direct | b:dense | diverge | 17 | – |",
        "| greedy | e:hit | 0–75 | 75–96 96–100 | paged | decode paged 15 | 1–2 |",
    ):
        assert line in lines
    assert "D31: not decided: r.jsonl: D31 needs one arm" in text
    assert "commit abc1234, a prompt of 100 tokens" in text
    for link in ("Records in [r.jsonl](data/r.jsonl);", "in [s.jsonl](s.jsonl).", "record in [p.json](data/p.json):"):
        assert link in text
    assert str(tmp_path) not in text


def test_what_is_no_record_is_refused(tool: Any, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="is no record of rounds, bench-engine or engine-parity"):
        tool.Kept([file], tmp_path)
