"""benchmarks/plots.py: points from records of every kind, and pictures of them where matplotlib is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_bench_rounds_fake import BENCHMARKS

DECODE = BENCHMARKS / "results" / "2026-11-30-h200-decode.json"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def lines_of(points: Any, kind: str) -> dict[str, list[Any]]:
    return {line.how: points[line] for line in points if line.kind == kind}


def row(rate: float, **more: Any) -> dict[str, Any]:
    cell = {"path": "scheduler", "batch": 1, "prompt_tokens": 256, "max_tokens": 128, "kv_storage": "paged"}
    return {"kind": "row", **cell, "decode_tok_s": rate, "decode_tok_s_total": rate * more.get("batch", 1), **more}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: dict[str, Any]) -> Path:
        file = tmp_path / "records.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    return write


def test_records_of_decode() -> None:
    from plot_points import read_points

    points = read_points([DECODE])
    assert {line.shape for line in points} == {"llama-3.2-1b", "qwen3-1.7b"}
    assert all(line.own and "commit 2ce70f2" in line.how for line in points)
    lone = {line.shape: points[line] for line in points if line.kind == "context"}
    sections = json.loads(DECODE.read_text())["sections"]
    for shape, found in lone.items():
        wanted = [each for each in sections["lone"] if each["shape"] == shape and "rows" in each]
        assert [(point.x, point.rate) for point in found] == [(each["keys"], each["tok_per_s"]) for each in wanted]
        assert [(point.low, point.high) for point in found] == [
            (1e3 / each["ms_range"][1], 1e3 / each["ms_range"][0]) for each in wanted
        ]
    crowds = [found for how, found in lines_of(points, "batch").items() if "Scheduler" in how]
    assert [[point.x for point in found] for found in crowds] == [[1, 2, 4, 8]]


def test_records_of_bench_engine(write: Callable[..., Path]) -> None:
    """Repeats of a cell are one point; the context is that in the middle of the reply."""
    from plot_points import Point, read_points

    header = {"kind": "header", "model": "random:llama-3.2-1b", "commit": "abc"}
    repeats = [row(rate) for rate in (100, 120, 110)]
    direct = row(90, path="direct", kv_storage="dense", prompt_tokens=8192)
    points = read_points([write(header, *repeats, direct, row(80, batch=8), {"kind": "summary"})])
    assert {line.shape for line in points} == {"llama-3.2-1b"}
    assert lines_of(points, "context") == {
        "bench-engine, scheduler path, paged KV, median of 3 repeats, commit abc": [Point(320, 110, 100, 120)],
        "bench-engine, direct path, dense KV, median of 1 repeats, commit abc": [Point(8256, 90, 90, 90)],
    }
    batches = lines_of(points, "batch")
    assert sorted(point for found in batches.values() for point in found) == [
        Point(1, 110, 100, 120),
        Point(8, 640, 640, 640),
    ]
    assert all("prompts of 256" in how for how in batches)


def test_records_of_rounds(write: Callable[..., Path]) -> None:
    """Arms are lines of their own; null arms and processes that failed are none."""
    from plot_points import Point, read_points

    program = {"model": "random:qwen3-1.7b", "commit": "abc"}
    header = {
        "kind": "header", "model": "random:qwen3-1.7b", "program": program,
        "arms": [{"name": "a"}, {"name": "b"}], "nulls": [{"name": "a-null", "source": "a"}],
    }  # fmt: skip
    measured = [("a", 0, 10, 0), ("a", 1, 12, 0), ("b", 0, 20, 0), ("b", 1, 99, 3), ("a-null", 0, 50, 0)]
    rows = [row(rate, arm=arm, round=turn, exit_code=code) for arm, turn, rate, code in measured]
    found = lines_of(read_points([write(header, *rows)]), "context")
    taken = "bench-engine, scheduler path, paged KV, rounds"
    assert found == {
        f"{taken}, arm a: median of 2 rounds, commit abc": [Point(320, 11, 10, 12)],
        f"{taken}, arm b: median of 1 rounds, commit abc": [Point(320, 20, 20, 20)],
    }


@pytest.mark.parametrize(
    "text", ["", "{}", '{"kind": "row"}\n{"kind": "row"}\n', '{"kind": "header", "model": "m"}\n{}\n']
)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    from plot_points import read_points

    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ValueError, match="file"):
        read_points([file])


def test_others_say_how_they_were_taken() -> None:
    from plot_points import peer_points

    points = peer_points()
    assert not any(line.own for line in points)
    assert {line.name for line in points if line.bound} == {"limit of the memory"}
    assert all(line.how and found for line, found in points.items())
    vllm = {(line.shape, line.kind): found for line, found in points.items() if line.name == "vLLM 0.24.0"}
    assert [(point.x, point.rate) for point in vllm["llama-3.2-1b", "batch"]] == [(8, 5717), (32, 17907), (128, 42592)]
    assert [(point.x, point.rate) for point in vllm["qwen3-1.7b", "context"]] == [(256, 489), (8192, 438)]
    for (shape, kind), limit in {
        (line.shape, line.kind): found for line, found in points.items() if line.bound
    }.items():
        most = {point.x: point.rate for point in limit}
        for line, found in points.items():
            if (line.shape, line.kind) == (shape, kind):
                assert all(point.rate <= most[point.x] for point in found)


def test_pictures_name_their_axes_and_every_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import plots
    from plot_points import peer_points, read_points

    out = tmp_path / "deep" / "out"
    monkeypatch.setattr("sys.argv", ["plots.py", str(DECODE), "--out", str(out), "--format", "svg"])
    plots.main()
    written = sorted(file.name for file in out.iterdir())
    assert written == ["llama-3.2-1b-batch.svg", "llama-3.2-1b-context.svg", "qwen3-1.7b-context.svg"]
    assert capsys.readouterr().out.split() == [str(out / name) for name in (written[1], written[2], written[0])]
    text = (out / "llama-3.2-1b-context.svg").read_text()
    words = re.sub(r"\s+", " ", " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", text)))
    assert "context (tokens)" in words
    assert "decode rate (tok/s)" in words
    for line in {**peer_points(), **read_points([DECODE])}:
        if (line.shape, line.kind) == ("llama-3.2-1b", "context"):
            assert f"{line.name} ({line.how})" in words
    before = text
    plots.main()
    assert (out / "llama-3.2-1b-context.svg").read_text() == before
