"""What `mlxcel bench-engine` computes and compares (docs/spec/clients.md 6), without a model."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import numpy as np
import pytest
from bench_rows import CELL, DEVICE, header, row, written

from mlxcel.core.kv import FullKV, KVSpec, RecurrentKV, SlidingKV
from mlxcel.core.plan import Decode, Piece, PrefillPlan, RowOutcome, Span, StepReport, id_bytes
from mlxcel.errors import UsageError
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.qwen import Qwen3
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.testing.random_checkpoint import SHAPES, random_checkpoint
from mlxcel.tools.bench.cells import Cell, cell_of, plan_cells
from mlxcel.tools.bench.compare import Base
from mlxcel.tools.bench.device import copying
from mlxcel.tools.bench.measure import cell_prompts
from mlxcel.tools.bench.records import summary
from mlxcel.tools.bench.report import table
from mlxcel.tools.bench.timing import RowTimes, figures, percentile
from mlxcel.tools.bench.traffic import Traffic
from mlxcel.tools.bench.watch import StepWatch
from mlxcel.tools.model_choice import ChosenModel
from mlxcel.tools.regression import BETTER, LONG, is_lost, loss_percent, may_lose

MS = 1_000_000

# --- rates ------------------------------------------------------------------------------------------------------------


def test_n_tokens_have_n_minus_1_intervals() -> None:
    found = figures([RowTimes(0, (40 * MS, 42 * MS, 44 * MS, 50 * MS))], prompt_tokens=80)
    assert (found["ttft_ms"], found["prefill_tok_s"]) == (40, 2000)
    assert (found["intervals"], found["decode_ms"]) == (3, 10)
    assert found["decode_tok_s"] == found["decode_tok_s_total"] == 300
    assert found["ms_per_token"] == pytest.approx(10 / 3)
    assert found["itl_ms"] == {"p50": 2, "p90": pytest.approx(5.2), "p99": pytest.approx(5.92), "max": 6}
    assert found["rows"] == [{"ttft_ms": 40, "decode_ms": 10, "decode_tok_s": 300}]


def test_two_tokens_have_one_interval() -> None:
    found = figures([RowTimes(5 * MS, (6 * MS, 8 * MS))], prompt_tokens=1)
    assert (found["ttft_ms"], found["intervals"], found["decode_tok_s"], found["ms_per_token"]) == (1, 1, 500, 2)
    assert set(found["itl_ms"].values()) == {2}


def test_a_batch_has_rates_a_row_and_in_total() -> None:
    """The second row begins later: what is of all goes from the first token of any row to the last of any."""
    early = RowTimes(0, (10 * MS, 12 * MS, 14 * MS))
    late = RowTimes(0, (20 * MS, 24 * MS, 28 * MS))
    found = figures([early, late], prompt_tokens=100)
    assert (found["ttft_ms"], found["prefill_tok_s"]) == (20, 10_000)
    assert (found["decode_ms"], found["intervals"]) == (18, 4)
    assert found["decode_tok_s_total"] == pytest.approx(4 / 0.018)
    assert found["decode_tok_s"] == pytest.approx((500 + 250) / 2)
    assert found["ms_per_token"] == 3
    assert [each["ttft_ms"] for each in found["rows"]] == [10, 20]


@pytest.mark.parametrize("percent", [0, 37, 50, 90, 99, 100])
def test_percentiles_are_numpys(percent: float) -> None:
    values = sorted(np.random.default_rng(3).random(17).tolist())
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert percentile([4.0], percent) == 4


# --- cells and prompts ------------------------------------------------------------------------------------------------


def test_every_path_prompt_and_batch_is_a_cell_and_the_direct_client_has_one_row() -> None:
    plan = plan_cells(("direct", "scheduler"), (8, 16), (1, 4), 5)
    assert plan.cells["direct"] == (Cell("direct", 1, 8, 5), Cell("direct", 1, 16, 5))
    assert [(cell.batch, cell.prompt_target_len) for cell in plan.cells["scheduler"]] == [
        (1, 8),
        (4, 8),
        (1, 16),
        (4, 16),
    ]
    assert plan.notes == ("batches of 4 rows: on the scheduler's path alone",)
    assert plan.most_rows == 4
    assert plan_cells(("scheduler",), (8,), (4,), 5).notes == ()
    assert list(plan_cells(("direct", "scheduler"), (8,), (2,), 5).cells) == ["scheduler"]
    with pytest.raises(UsageError, match="--batch 4: the direct path runs one row"):
        plan_cells(("direct",), (8,), (1, 4), 5)


def test_a_prompt_is_cut_to_what_the_reply_leaves() -> None:
    cell = Cell("direct", 1, 100, 8)
    assert (cell.prompt_tokens(500), cell.prompt_tokens(108), cell.prompt_tokens(64)) == (100, 100, 56)
    with pytest.raises(UsageError, match="--max-tokens 8 leaves no room for a prompt: the context holds 8"):
        cell.prompt_tokens(8)


@pytest.mark.parametrize("length", [1, 7, 256, 1000])
def test_prompts_have_their_exact_length_and_differ_in_their_first_token(length: int) -> None:
    tokenizer = ByteTokenizer()
    prompts = cell_prompts(ChosenModel("m"), tokenizer, tokenizer.size, length, 3)
    assert [(ids.dtype, ids.shape) for ids in prompts] == [(np.int32, (length,))] * 3
    assert len({int(ids[0]) for ids in prompts}) == 3
    assert all(np.array_equal(ids[1:], prompts[0][1:]) for ids in prompts)
    text = tokenizer.decode([int(token) for token in prompts[0]], skip_special=True)
    assert text.startswith("The lighthouse keeper"[: min(length, 10)])


def test_a_model_without_a_tokenizer_gets_ids_of_its_vocabulary() -> None:
    checkpoint = random_checkpoint(Llama(), {**SHAPES["llama-3.2-1b"], "vocab_size": 50, "num_hidden_layers": 1})
    chosen = ChosenModel("random", checkpoint)
    (first, second), again = (cell_prompts(chosen, ByteTokenizer(), 50, 300, rows) for rows in (2, 1))
    assert np.array_equal(first, again[0])
    assert (len(first), int(first.min()) >= 0, int(first.max()) < 50) == (300, True, True)
    assert len(np.unique(first)) == 50
    assert int(second[0]) == (int(first[0]) + 1) % 50


# --- what is watched --------------------------------------------------------------------------------------------------


def test_tokens_pieces_and_launches_are_those_of_the_run_and_nobody_elses() -> None:
    moments = iter(range(10, 100, 10))
    watch = StepWatch(lambda: next(moments))
    ids = np.array([7, 8, 9], np.int32)
    plan = PrefillPlan(id_bytes(ids), 0, (Span(0, 2, 2), Span(2, 3, 4)), "R0")
    other = PrefillPlan(id_bytes(ids[:2]), 0, (Span(0, 2, 2),), "R0")

    def step(part: Piece | Decode, token: int | None, route: str, **outcome: object) -> None:
        done = RowOutcome(part.sequence_id, token=token, appended=token is not None, **outcome)  # type: ignore[arg-type]
        watch.step_finished(StepReport(1, (part,), (done,), 1, {route: 2}))

    watch.begin([ids])
    step(Decode(4), 1, "of the run before")
    step(Piece(6, other, 0), 2, "of another row")
    step(Piece(5, plan, 0), None, "piece")
    step(Piece(5, plan, 1), 3, "piece")
    step(Decode(5), 4, "paged")
    step(Decode(5), None, "dropped, since the row had ended")
    step(Decode(5), None, "failed", error=ValueError("row"))
    (row,) = watch.rows()
    assert (row.tokens, row.pieces) == ([40, 50], [[0, 2, 0], [2, 3, 3]])
    assert watch.launches() == {"prefill": {"piece": 4}, "decode": {"paged": 2}}
    watch.begin([ids])
    assert (watch.rows()[0].tokens, watch.launches()) == ([], {})


def test_a_step_of_pieces_and_decodes_is_mixed() -> None:
    watch = StepWatch(lambda: 1)
    prompts = [np.array([1], np.int32), np.array([2], np.int32)]
    plans = [PrefillPlan(id_bytes(ids), 0, (Span(0, 1, 1),), "R2") for ids in prompts]
    watch.begin(prompts)
    watch.step_finished(StepReport(1, (Piece(1, plans[0], 0),), (RowOutcome(1, token=1, appended=True),), 1, {"a": 1}))
    both = (Piece(2, plans[1], 0), Decode(1))
    outcomes = tuple(RowOutcome(part.sequence_id, token=1, appended=True) for part in both)
    watch.step_finished(StepReport(2, both, outcomes, 2, {"a": 3}))
    assert watch.launches() == {"prefill": {"a": 1}, "mixed": {"a": 3}}


# --- bytes ------------------------------------------------------------------------------------------------------------

PUBLISHED = {
    # parameters, GB of weights in bfloat16, GB that a step reads of them, KV bytes a token
    "llama-3.2-1b": (1_235_814_400, 2.472, 2.472, 32_768),
    "qwen3-0.6b": (596_049_920, 1.192, 1.192, 114_688),
    "qwen3-1.7b": (1_720_574_976, 3.441, 3.441, 114_688),
    "llama-3.1-8b": (8_030_261_248, 16.061, 15.010, 131_072),
}
"""docs/spec/clients.md 6.5."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_of_the_published_shapes(name: str) -> None:
    parameters, weights, read, kv = PUBLISHED[name]
    family = {"llama": Llama, "qwen3": Qwen3}[SHAPES[name]["model_type"]]()
    checkpoint = random_checkpoint(family, SHAPES[name])
    assert sum(tensor.size for tensor in checkpoint.tensors.values()) == parameters
    config = family.parse_config(checkpoint)
    traffic = Traffic.of(family, config, weight_bytes=2 * parameters, dtype="bfloat16")
    assert round(traffic.weight_bytes / 1e9, 3) == weights
    assert round(traffic.read_weights(1) / 1e9, 3) == read
    assert traffic.kv_bytes_per_token == kv
    assert traffic.step_bytes(2, 100.5) - traffic.read_weights(2) == 2 * 100.5 * kv


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_arrays_of_the_small_shapes_are_as_large_as_the_formula_says(name: str) -> None:
    """One layer of each, read, and one more layer by another checkpoint's names and shapes."""
    family = {"llama": Llama, "qwen3": Qwen3}[SHAPES[name]["model_type"]]()
    small = {**SHAPES[name], "vocab_size": 1024}
    built = [random_checkpoint(family, {**small, "num_hidden_layers": layers}) for layers in (1, 2)]
    counted = [sum(tensor.size for tensor in checkpoint.tensors.values()) for checkpoint in built]
    assert sum(built[0].read(tensor).size for tensor in built[0].tensors) == counted[0]
    layers, a_layer = SHAPES[name]["num_hidden_layers"], counted[1] - counted[0]
    rows = SHAPES[name]["vocab_size"] - 1024
    assert counted[0] + (layers - 1) * a_layer + rows * SHAPES[name]["hidden_size"] == PUBLISHED[name][0]


def test_windows_are_read_as_far_as_they_go_and_state_whole() -> None:
    kv = KVSpec((FullKV(2, 8, 8), SlidingKV(2, 8, 8, window=100), RecurrentKV(((3, 5), (7,)))))
    traffic = Traffic(1000, 0, 4, 0, (0, 0), kv, 2)
    assert traffic.read_kv(40) == 2 * (40 * 32 + 40 * 32 + 22)
    assert traffic.read_kv(400) == 2 * (400 * 32 + 100 * 32 + 22)
    assert traffic.kv_bytes_per_token == 2 * (32 + 32)


def test_an_embedding_of_its_own_and_idle_experts_are_not_read() -> None:
    traffic = Traffic(1000, 300, 4, 400, (8, 2), KVSpec(()), 2)
    assert traffic.read_weights(1) == 1000 - 300 - 400 * 6 // 8 + 4 * 2
    assert traffic.read_weights(3) == 1000 - 300 - 400 * 2 // 8 + 3 * 4 * 2
    assert traffic.read_weights(5) == 1000 - 300 + 5 * 4 * 2
    tied = attrs.evolve(traffic, embedding_bytes=0)
    assert tied.read_weights(5) == 1000


def test_the_host_copies_at_some_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxcel.tools.bench.device.CPU_BYTES", 1 << 20)
    copy = copying("cpu", "auto")
    assert all(0 < copy() < math.inf for _ in range(2))


# --- summaries, table, gate -------------------------------------------------------------------------------------------


def whole_row(achieved: float = 100.0, **changed: object) -> dict[str, object]:
    found = {
        **row(), "prompt_tokens": 256, "kv_storage": "dense", "prefill_tok_s": 1.0, "decode_tok_s_total": 500.0,
        "ms_per_token": 2.0, "achieved_gb_s": achieved, "percent_of_copy": 50.0, "note": None,
    }  # fmt: skip
    return {**found, **changed}


def test_a_summary_has_medians_and_takes_the_mean_of_both_copies() -> None:
    found = summary([whole_row(ttft_ms=each) for each in (3.0, 1.0, 8.0)], [195.0, 205.0])
    assert found["ttft_ms"] == {"median": 3, "min": 1, "max": 8}
    assert found["percent_of_copy"] == {"median": 50, "min": 50, "max": 50}
    assert cell_of(found) == cell_of(CELL)
    assert (found["repeats"], found["copy_gb_s"], found["note"]) == (3, [195.0, 205.0], None)
    without = summary([whole_row()], [])
    assert (without["percent_of_copy"], without["copy_gb_s"]) == (None, [])


def test_copies_that_differ_are_told_and_the_table_marks_notes() -> None:
    found = summary([whole_row(note="odd"), whole_row(note="odd")], [100.0, 106.0])
    assert found["note"] == "odd; the two copies differ by more than 5 %: something else ran here"
    lines = list(table([found, summary([whole_row()], [])]))
    assert lines[1].endswith(" *")
    assert not lines[2].endswith("*")
    assert lines[3] == "* odd; the two copies differ by more than 5 %: something else ran here"
    assert lines[2].split() == ["direct", "1", "256", "dense", "10.0", "1", "500.0", "500.0", "2.000", "100.0", "–"]


def test_a_loss_is_less_of_what_should_be_more_and_more_of_what_should_be_less() -> None:
    assert (loss_percent("decode_tok_s", 200, 198), loss_percent("ttft_ms", 50, 51)) == (1, 2)
    assert (loss_percent("decode_tok_s", 200, 202), loss_percent("ttft_ms", 50, 49)) == (-1, -2)
    for figure, better in BETTER.items():
        for prompt in (LONG - 1, LONG):
            edge = 100 - better * may_lose(figure, prompt)
            assert not is_lost(figure, prompt, 100, edge)
            assert is_lost(figure, prompt, 100, edge - better * 1e-6)
        assert may_lose(figure, LONG) < may_lose(figure, LONG - 1) == may_lose(figure, 1)


FIRST, RATE = may_lose("ttft_ms", 256), may_lose("decode_tok_s", 256)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ((10.0, 500.0), ["held", "held"]),
        ((10.0 * (1 + 0.009 * FIRST), 500.0 * (1 - 0.009 * RATE)), ["held", "held"]),
        ((10.0, 500.0 * (1 - 0.02 * RATE)), ["held", "LOST"]),
        ((10.0 * (1 + 0.02 * FIRST), 500.0), ["LOST", "held"]),
        ((5.0, 900.0), ["better", "better"]),
    ],
)
def test_the_gate_compares_medians(tmp_path: Path, now: tuple[float, float], words: list[str]) -> None:
    """The median of three before, of which one is far off, and of two now."""
    base = Base.read(written(tmp_path / "base", header(), row(10.0, 500.0), row(10.0, 500.0), row(99.0, 1.0)))
    verdicts = list(base.verdicts([row(*now), row(*now)]))
    assert [verdict.line.split()[0] for verdict in verdicts] == words
    assert [verdict.lost for verdict in verdicts] == [word == "LOST" for word in words]
    assert "prompt_target_len 256" in verdicts[0].line


@pytest.mark.parametrize("name", DEVICE)
def test_figures_of_another_device_or_model_are_not_compared(tmp_path: Path, name: str) -> None:
    base = Base.read(written(tmp_path / "base", header(), row()))
    base.require_same(header())
    with pytest.raises(UsageError, match=f"was measured with {name} "):
        base.require_same(header(**{name: "another"}))


@pytest.mark.parametrize("name", CELL)
def test_a_cell_that_was_not_measured_is_not_compared(tmp_path: Path, name: str) -> None:
    base = Base.read(written(tmp_path / "base", header(), row()))
    base.require_cells([cell_of(row())])
    with pytest.raises(UsageError, match="has no cell of .*" + name):
        base.require_cells([cell_of(row(**{name: "another"}))])


@pytest.mark.parametrize(
    "records",
    [
        [],
        [row()],
        [header()],
        [header(tool="other"), row()],
        [header(), {"kind": "row"}],
        [header(), row(ttft_ms=0.0)],
        [header(), row(ttft_ms=float("inf"))],
        [header(), row(decode_tok_s=float("nan"))],
        [header(), row(decode_tok_s="fast")],
        [header(), []],
        [header(), row(), {"no": "kind"}],
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, records: list[dict[str, object]]) -> None:
    with pytest.raises(UsageError, match="it holds no records of bench-engine"):
        Base.read(written(tmp_path / "base", *records))


def test_a_file_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Base.read(str(tmp_path / "none"))
    (tmp_path / "text").write_bytes(b"hello\n")
    with pytest.raises(UsageError, match="it holds no records"):
        Base.read(str(tmp_path / "text"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="it holds no records"):
        Base.read(str(tmp_path / "bytes"))
