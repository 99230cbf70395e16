"""Summaries of benchmarks/engine_bench_rounds.py on records made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from engine_bench_rounds_fake import BENCHMARKS

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def header(rounds: int = 3, arms: tuple[str, ...] = ("a", "b"), nulls: tuple[str, ...] = ("a",)) -> Record:
    named = [{"name": name, "flags": []} for name in arms]
    copies = [{"name": f"{name}-null", "source": name, "flags": []} for name in nulls]
    return {"kind": "header", "arms": named, "nulls": copies, "rounds": rounds}


def row(arm: str, turn: int, value: Any, **more: Any) -> Record:
    cell = {"path": "direct", "prompt_target_len": 256, "batch": 1}
    return {"kind": "row", **cell, "arm": arm, "round": turn, "decode_tok_s": value, "exit_code": 0, **more}


def rows(values: dict[str, list[Any]]) -> list[Record]:
    """None: this process gave nothing."""
    return [
        row(arm, turn, value) for arm, each in values.items() for turn, value in enumerate(each) if value is not None
    ]


def summary(records: list[Record]) -> Record:
    from rounds.summary import summarise

    (found,) = summarise(records)
    return found


def text(records: list[Record]) -> str:
    from rounds.summary import summarise
    from rounds.tables import summary_lines

    return "\n".join(summary_lines(summarise(records)))


def test_medians_and_differences_in_the_same_round() -> None:
    """Each round has its own level; the differences do not see it."""
    found = summary([header(), *rows({"a": [100, 200, 50], "b": [103, 204, 52], "a-null": [101, 199, 50]})])
    assert found["arms"] == {
        "a": {"median": 100, "min": 50, "max": 200, "rounds": 3},
        "b": {"median": 103, "min": 52, "max": 204, "rounds": 3},
        "a-null": {"median": 101, "min": 50, "max": 199, "rounds": 3},
    }
    delta = found["deltas"]["b"]
    assert [delta[name] for name in ("median", "min", "max")] == pytest.approx([3, 2, 4])
    assert (delta["against"], delta["rounds"], delta["same_sign"], delta["within_noise"]) == ("a", 3, 3, False)
    null = found["nulls"]["a-null"]
    assert [null[name] for name in ("median", "min", "max")] == pytest.approx([0, -0.5, 1])
    assert (null["against"], null["same_sign"]) == ("a", 1)
    assert found["widest_null_percent"] == pytest.approx(1)
    assert not found["partial"]


def test_rounds_whose_sign_is_the_medians() -> None:
    found = summary([header(), *rows({"a": [100, 100, 100], "b": [98, 99, 103], "a-null": [100, 100, 100]})])
    assert found["deltas"]["b"]["median"] == pytest.approx(-1)
    assert found["deltas"]["b"]["same_sign"] == 2


@pytest.mark.parametrize(
    ("null", "noise"),
    [([97, 100, 100], True), ([100, 100, 103], True), ([98.1, 101.9, 100], False), ([100, 100, 100], False)],
)
def test_a_difference_inside_the_widest_null_is_noise_whichever_its_sign(null: list[float], noise: bool) -> None:
    records = [header(), *rows({"a": [100, 100, 100], "b": [102, 102, 102], "a-null": null})]
    assert summary(records)["deltas"]["b"]["within_noise"] is noise
    assert ("within noise" in text(records)) is noise


def test_the_widest_of_several_nulls_counts() -> None:
    values: dict[str, list[Any]] = {"a": [100, 100], "b": [102, 102], "a-null": [100, 100.5], "b-null": [105, 102]}
    found = summary([header(2, nulls=("a", "b")), *rows(values)])
    assert found["nulls"]["b-null"]["against"] == "b"
    assert found["widest_null_percent"] == pytest.approx(100 * 3 / 102)
    assert found["deltas"]["b"]["within_noise"]


def test_only_rounds_that_both_have_are_compared() -> None:
    found = summary([header(), *rows({"a": [100, None, 200], "b": [110, 999, 180], "a-null": [None, 100, 200]})])
    assert [found["deltas"]["b"][name] for name in ("min", "max", "rounds")] == pytest.approx([-10, 10, 2])
    assert found["nulls"] == {}
    assert found["widest_null_percent"] is None
    assert found["deltas"]["b"]["within_noise"] is None
    assert found["partial"]


def test_one_round_has_no_differences() -> None:
    records = [header(1), *rows({"a": [100], "b": [110], "a-null": [100]})]
    found = summary(records)
    assert (found["deltas"], found["nulls"], found["partial"]) == ({}, {}, False)
    assert "they need two rounds" in text(records)


def test_repeats_of_a_process_count_once() -> None:
    records = [header(1, ("a",), ()), *(row("a", 0, value, repeat=n) for n, value in enumerate((1, 50, 40)))]
    assert summary(records)["arms"]["a"] == {"median": 40, "min": 40, "max": 40, "rounds": 1}


def test_rows_that_do_not_count() -> None:
    """Of a process that failed; without the figure; with a figure that is none."""
    records = [header(1, ("a",), ()), row("a", 0, 5), row("a", 0, 90, exit_code=3), row("a", 0, 90, exit_code=None)]
    assert summary([*records, row("a", 0, None), row("a", 0, "fast"), row("a", 0, True)])["arms"]["a"]["max"] == 5


def test_cells_stand_apart() -> None:
    from rounds.summary import summarise

    cells = [("direct", 256, 1), ("direct", 8192, 1), ("scheduler", 256, 1), ("scheduler", 256, 8)]
    made = [
        row("a", 0, 100 + place, path=path, prompt_target_len=length, batch=batch, ttft_ms=5)
        for place, (path, length, batch) in enumerate(cells)
    ]
    found = summarise([header(1, ("a",), ()), *made])
    keys = [(record["path"], record["prompt_target_len"], record["batch"], record["metric"]) for record in found]
    assert keys == [(*cell, metric) for cell in cells for metric in ("ttft_ms", "decode_tok_s")]
    assert [record["arms"]["a"]["median"] for record in found[1::2]] == [100, 101, 102, 103]


def test_rows_taken_on_a_busy_host_are_marked() -> None:
    records = [header(2, ("a", "b"), ()), *rows({"a": [1, 1], "b": [1, 1]}), row("b", 1, 1, gate_reason="cc1plus")]
    assert summary(records)["busy_rounds"] == {"b": [1]}
    assert [line.strip()[:2] for line in text(records).splitlines() if "1 (1 … 1)" in line] == ["a ", "*b"]
    assert "the host was busy" in text(records)


def test_the_widest_differences_are_stated_for_a_threshold() -> None:
    """docs/spec/engine.md D32: rounded up to half a percent."""
    printed = text([header(), *rows({"a": [100, 100, 100], "b": [100, 100, 100], "a-null": [99.3, 100, 101.2]})])
    assert "in one round: 1.20 %, rounded up to a half 1.5 % (decode_tok_s; direct, prompt of 256, batch 1)" in printed
    assert "of a median: 0.00 %, rounded up to a half 0.0 %" in printed


def test_no_row_at_all() -> None:
    assert text([header()]) == "no process gave a row"


def test_the_threshold_is_the_engines() -> None:
    """docs/spec/engine.md D32."""
    from rounds import comparison

    from mlxcel.tools import regression

    rule = comparison.rule()
    assert (rule.metrics, rule.words) == (tuple(regression.BETTER), regression.allowed())
    cases = [(figure, prompt) for figure in regression.BETTER for prompt in (1, regression.LONG - 1, regression.LONG)]
    assert [rule.most(*case) for case in cases] == [regression.may_lose(*case) for case in cases]
    assert rule.loss("ttft_ms", 10, 11) == regression.loss_percent("ttft_ms", 10, 11)
