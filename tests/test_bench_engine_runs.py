"""`mlxcel bench-engine` from its arguments to its exit code (docs/spec/clients.md 6.6), over the toy model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_rows import BORED, CELL, COMPILING, FAILING, INTERRUPTED, ROUTELESS, written
from cli_runs import Cli, Ran
from plugin_doubles import Installer

from mlxcel.cli.bench_engine import command
from mlxcel.tools.bench import records
from mlxcel.tools.model_choice import SHAPES
from mlxcel.tools.regression import allowed

ROOT = Path(__file__).parent.parent
QUICK = ("-n", 8, "--repeats", 2, "--warmup-tokens", 2, "--no-copy-bandwidth", "--backend", "reference-numpy")
SHORT = (*QUICK, "--prompt-tokens", "12")
ODD = ("--backend", "odd", *QUICK[2:-2], "--prompt-tokens", "12", "-n", 8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], store: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(store))
    return Cli(monkeypatch, capfdbinary)


Bench = Callable[..., Ran]


@pytest.fixture
def bench(cli: Cli) -> Bench:
    def run(*arguments: object, model: object = "tiny", **environ: str) -> Ran:
        return cli("bench-engine", *([] if model is None else [model]), *arguments, **environ)

    return run


def lines(ran: Ran, kind: str | None = None, code: int = 0) -> list[dict[str, Any]]:
    """The records on stdout, all or those of a kind."""
    assert ran.code == code, ran.err
    found = [json.loads(line) for line in ran.out.splitlines()]
    return [record for record in found if kind in (None, record["kind"])]


def named_fields(kind: str) -> set[str]:
    """Those of 6.4's table."""
    text = (ROOT / "docs/spec/clients.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {kind} \| (`tool.*|`path.*) \|$", text, re.MULTILINE)
    line = re.sub(r"\[?\{[^}]*\}+\]?|\([^)]*\)", "", line)
    return set(re.findall(r"[a-z][a-z0-9_]+", line))


def test_both_paths_both_storages_and_batches(bench: Bench, tmp_path: Path) -> None:
    """6.6: 5, 6, 8. The pieces that ran prove the chunk on both paths, the launches the storage."""
    out = tmp_path / "records"
    asked = (*QUICK, "--prompt-tokens", "20,40", "--batch", "1,2", "--prefill-chunk", 16, "--label", "a b")
    ran = bench(*asked, "--out", out, "--kv-storage", "paged", MLXCEL_DECODE_TIMEOUT="77", MLXCEL_API_KEY="secret")
    everything = lines(ran)
    assert [record["kind"] for record in everything] == ["header", *["row"] * 12, *["summary"] * 6]
    assert [json.loads(line) for line in out.read_text().splitlines()] == everything

    head = everything[0]
    assert set(head) == named_fields("header") | {"kind"}
    assert (head["tool"], head["label"], head["model"], head["family"]) == ("bench-engine", "a b", "tiny", "tiny")
    assert (head["backend"], head["level"], head["dtype"]) == ("reference-numpy", "R2", "float32")
    assert (head["params"], head["weight_bytes"], head["kv_bytes_per_token"]) == (107_200, 428_800, 512)
    assert (head["random_weights"], head["copy_gb_s"]) == (None, None)
    assert head["env"]["MLXCEL_DECODE_TIMEOUT"] == "77"
    assert "secret" not in ran.out

    rows = lines(ran, "row")
    cells = [(row["path"], row["prompt_tokens"], row["batch"]) for row in rows]
    assert cells[::2] == cells[1::2] == [
        ("direct", 20, 1), ("direct", 40, 1),
        ("scheduler", 20, 1), ("scheduler", 20, 2), ("scheduler", 40, 1), ("scheduler", 40, 2),
    ]  # fmt: skip
    for row in rows:
        assert set(row) == named_fields("row") | {"kind"}
        assert (row["max_tokens"], row["generated_tokens"]) == (8, 8 * row["batch"])
        assert (row["intervals"], len(row["rows"])) == (7 * row["batch"], row["batch"])
        cut = [[0, 16, 0], [16, 20, 0]] if row["prompt_tokens"] == 20 else [[0, 16, 0], [16, 32, 0], [32, 40, 0]]
        assert (row["prefill_chunk"], row["pieces"]) == (16, [cut] * row["batch"])
        assert (row["kv_storage_asked"], row["kv_storage"]) == ("paged", "paged")
        routes = row["attention_launches"]
        assert {route for phase in routes.values() for route in phase} == {"ref_paged_gather"}
        decoded = routes["decode"]["ref_paged_gather"] + routes.get("mixed", {}).get("ref_paged_gather", 0)
        assert decoded >= 7 * row["batch"] * 2  # layers
        assert (row["compiles"], row["finish_cause"], row["note"]) == (0, "max_tokens", None)
        assert row["memory_peak_bytes"] > 1 << 20
        itl = row["itl_ms"]
        assert 0 < itl["p50"] <= itl["p90"] <= itl["p99"] <= itl["max"] <= row["decode_ms"]
        assert row["bytes_per_step"] == pytest.approx(
            428_800 - 4 * 259 * 64 + row["batch"] * (4 * 64 + 512 * (row["prompt_tokens"] + 4))
        )
        assert row["achieved_gb_s"] == pytest.approx(row["bytes_per_step"] / row["ms_per_token"] / 1e6)

    for place, found in enumerate(lines(ran, "summary")):
        pair = rows[2 * place : 2 * place + 2]
        assert [row["repeat"] for row in pair] == [1, 2]
        for name in ("ttft_ms", "decode_tok_s", "ms_per_token"):
            values = [row[name] for row in pair]
            assert found[name] == {"median": pytest.approx(sum(values) / 2), "min": min(values), "max": max(values)}
    assert "tok/s a row" in ran.err
    assert len([line for line in ran.err.splitlines() if line.lstrip().startswith(("direct", "scheduler"))]) == 6
    assert "batches of 2 rows: on the scheduler's path alone" in ran.err


def test_dense_rows_on_the_scheduler_and_the_names_of_its_path(bench: Bench) -> None:
    rows = lines(bench(*SHORT, "--path", "server", "--kv-storage", "dense", "--batch", "6"), "row")
    assert [(row["path"], row["batch"], row["kv_storage"]) for row in rows] == [("scheduler", 6, "dense")] * 2
    assert {route for row in rows for phase in row["attention_launches"].values() for route in phase} == {
        "ref_dense_gather"
    }
    assert [row["path"] for row in lines(bench(*SHORT, "--path", "cli"), "row")] == ["direct"] * 2


def test_seeded_sampling_is_measured_too(bench: Bench) -> None:
    assert {row["sampling"] for row in lines(bench(*SHORT, "--sampling", "seeded"), "row")} == {"seeded"}


def test_copies_are_measured_twice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """6.6: 9. Before the first cell, for the header and the rows, and behind the last one of all paths."""
    copied: list[str] = []

    def copying(platform: str, device: str) -> Callable[[], float]:
        def copy() -> float:
            copied.append(platform)
            return 100.0 * len(copied)

        return copy

    monkeypatch.setattr("mlxcel.tools.bench_engine.copying", copying)
    ran = bench(*[each for each in SHORT if each != "--no-copy-bandwidth"])
    assert copied == ["cpu", "cpu"]
    (head,), rows, summaries = (lines(ran, kind) for kind in ("header", "row", "summary"))
    assert head["copy_gb_s"] == 100
    assert all(row["percent_of_copy"] == pytest.approx(row["achieved_gb_s"]) for row in rows)
    for found in summaries:
        assert found["copy_gb_s"] == [100, 200]
        assert found["percent_of_copy"]["median"] == pytest.approx(found["achieved_gb_s"]["median"] / 1.5)
        assert "the two copies differ" in found["note"]


def test_weights_are_read_once_and_runs_are_followed_where_somebody_looks(bench: Bench) -> None:
    """6.3, 6.4: stderr has a line for each run with -v; where it is no terminal the table alone."""
    plain = bench(*SHORT)
    assert plain.err.count("loading the weights") == 2  # its begin and its end
    assert " run 1 of 2" not in plain.err
    told = bench(*SHORT, "-v").err
    for words in ("direct, prompt of 12, rows 1: warm-up", "direct, prompt of 12, rows 1: run 2 of 2, first token"):
        assert words in told
    assert told.count(" run 1 of 2") == 2
    assert re.search(r"mlxcel\.bench: start .* s, backend .* s, opening direct .* s, .*runs .* s", told)
    assert "copies" not in told


def test_random_weights_are_measured_without_a_model(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256,
    }  # fmt: skip
    monkeypatch.setattr("mlxcel.tools.model_choice.SHAPES", {"small": {**SHAPES["llama-3.2-1b"], **small}})
    ran = bench(*SHORT, "--random-weights", "small", "--weights-seed", 3, model=None)
    (head,) = lines(ran, "header")
    assert (head["model"], head["random_weights"], head["family"]) == ("random:small", "small", "llama")
    assert len(lines(ran, "row")) == 4


def test_a_prompt_that_leaves_no_room_is_cut_and_both_numbers_are_told(bench: Bench) -> None:
    """6.6: 2."""
    ran = bench(*QUICK, "--prompt-tokens", "100", "--ctx-size", 64, "--path", "direct")
    assert {(row["prompt_target_len"], row["prompt_tokens"]) for row in lines(ran, "row")} == {(100, 56)}
    assert "a prompt of 100 tokens is cut to 56: the context holds 64, and 8 are for the reply" in ran.err


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "1"), "'1' is not an integer from 2"),
        (("--prefill-chunk", "0"), "'0' is not an integer from 1"),
        (("--repeats", "0"), "'0' is not an integer from 1"),
        (("--warmup-tokens", "1"), "'1' is not an integer from 2"),
        (("--prompt-tokens", "256,x"), "'256,x' is not integers from 1 to 2147483647 separated by commas"),
        (("--prompt-tokens", "0"), "'0' is not integers from 1"),
        (("--batch", ""), "'' is not integers from 1 to 65536"),
        (("--batch", "65537"), "'65537' is not integers from 1 to 65536"),
        (("--path", "gpu"), "'gpu' is not"),
        (("--sampling", "odd"), "'odd' is not"),
        (("--path", "direct", "--batch", "1,2"), "--batch 2: the direct path runs one row"),
        (("--batch", "8", "--parallel", "4"), "--batch 8 is more than --parallel 4"),
        (("--random-weights", "llama-3.2-1b"), "--random-weights llama-3.2-1b and the model"),
        (("--random-weights", "gpt-7"), "--random-weights gpt-7: there is no such shape"),
        (("--compare", "no-such-file"), "--compare no-such-file: No such file"),
        (("--out", "no-such-folder/file"), "--out no-such-folder/file cannot be written: No such file"),
        (("--prompt-cache",), "no such option"),
        (("--chat-template", "x"), "no such option"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    bench: Bench, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    """6.6: 3. The model is an empty folder: loading it would end with 3."""
    ran = bench(*arguments, model=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert "hint: " in ran.err


def test_a_chunk_that_a_variable_says_otherwise_is_refused(bench: Bench, tmp_path: Path) -> None:
    """The chunk is the flag's, or the default: no variable changes what is measured unseen."""
    for arguments, variable, said in (
        ((), "512", "MLXCEL_PREFILL_CHUNK is 512, and --prefill-chunk 2048"),
        (("--prefill-chunk", 64), "512", "MLXCEL_PREFILL_CHUNK is 512, and --prefill-chunk 64"),
    ):
        ran = bench(*arguments, model=tmp_path, MLXCEL_PREFILL_CHUNK=variable)
        assert (ran.code, said in ran.err) == (2, True)
    rows = lines(bench(*SHORT, "--prefill-chunk", 512, MLXCEL_PREFILL_CHUNK="512"), "row")
    assert {row["prefill_chunk"] for row in rows} == {512}
    assert lines(bench(*SHORT, "--path", "direct", MLXCEL_PREFILL_CHUNK="2048"), "row")


def test_a_batch_that_the_memory_does_not_hold_is_refused(bench: Bench) -> None:
    ran = bench(
        *SHORT, "--path", "scheduler", "--batch", "3", "--kv-cache-budget", 512 * 2048 * 2, "--kv-storage", "dense"
    )
    assert (ran.code, ran.out) == (2, "")
    assert "--batch 3: the scheduler has 2 rows here" in ran.err


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_compile_while_the_clock_runs_is_told_and_ends_with_3(bench: Bench, third_party: Installer) -> None:
    """6.6: 4. The warm-up's own compiles are in no row."""
    third_party.install("odd", COMPILING)
    ran = bench(*ODD[:-2], "-n", 4, "--path", "direct")
    rows = lines(ran, "row", code=3)
    assert [row["compiles"] for row in rows] == [4, 4]
    assert {row["note"] for row in rows} == {"4 programs compiled while the clock ran"}
    (found,) = lines(ran, "summary", code=3)
    assert found["note"] == "4 programs compiled while the clock ran"
    assert "error: 8 programs were compiled while the clock ran" in ran.err


def test_a_reply_that_ends_early_is_no_shorter_average(bench: Bench, third_party: Installer) -> None:
    """6.6: 4."""
    third_party.install("bored", BORED)
    for path in ("direct", "scheduler"):
        ran = bench(*SHORT, "--path", path)
        assert lines(ran, "row", code=3) == []
        assert "row 0 ended after 5 of 8 tokens: boredom" in ran.err


def test_a_backend_that_fails_ends_with_3(bench: Bench, third_party: Installer) -> None:
    third_party.install("odd", FAILING)
    for path in ("direct", "scheduler"):
        ran = bench(*ODD, "--path", path)
        assert (ran.code, "the device is gone" in ran.err) == (3, True)


def test_ctrl_c_ends_with_130(bench: Bench, third_party: Installer) -> None:
    third_party.install("odd", INTERRUPTED)
    for path in ("direct", "scheduler"):
        ran = bench(*ODD, "--path", path)
        assert [record["kind"] for record in lines(ran, code=130)] == ["header"]
        assert "interrupted" in ran.err


def test_a_full_disk_is_named_by_its_flag(bench: Bench) -> None:
    ran = bench(*SHORT, "--path", "direct", "--out", "/dev/full")
    assert ran.code == 3
    assert "error: --out /dev/full cannot be written: No space left on device" in ran.err


@pytest.mark.parametrize("gate", [True, False])
def test_a_reader_that_leaves_ends_a_run_that_nothing_else_wants(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: bool
) -> None:
    """1.2. A gate or a file does want it: all of it is measured and kept."""

    def leave(line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("mlxcel.cli.bench_engine.click.echo", leave)
    for module in ("bench_engine", "main"):
        monkeypatch.setattr(f"mlxcel.cli.{module}.give_up_stdout", lambda: None)
    file = tmp_path / "records"
    ran = bench(*SHORT, "--path", "direct", *(("--out", file) if gate else ()))
    assert (ran.code, ran.out) == (0, "")
    assert file.exists() == gate
    if gate:
        kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
        assert kinds == ["header", "row", "row", "summary"]


def test_quietly_only_the_records_are_written(bench: Bench, third_party: Installer) -> None:
    ran = bench(*SHORT, "--path", "direct", "-q")
    assert (len(lines(ran)), ran.err) == (4, "")


def test_paged_storage_without_a_paged_launch_is_marked(bench: Bench, third_party: Installer) -> None:
    third_party.install("odd", ROUTELESS)
    ran = bench(*ODD, "--path", "scheduler")
    rows = lines(ran, "row")
    assert {(row["kv_storage"], row["note"]) for row in rows} == {("paged", "paged storage, no paged launch")}
    assert all("something_else" in row["attention_launches"]["decode"] for row in rows)
    assert "* paged storage, no paged launch" in ran.err


# --- the gate ---------------------------------------------------------------------------------------------------------


def records_of(bench: Bench) -> list[dict[str, Any]]:
    return lines(bench(*SHORT, "--path", "direct"))


def test_the_gate_ends_with_1_for_a_loss_and_0_without_one(bench: Bench, tmp_path: Path) -> None:
    """6.6: 10. The earlier records are those of a run, a thousand times as good or as bad."""
    found = records_of(bench)
    for factor, code, word in ((1000.0, 1, "LOST"), (0.001, 0, "better")):
        base = [
            {**each, "decode_tok_s": each["decode_tok_s"] * factor} if each["kind"] == "row" else each for each in found
        ]
        if code == 0:
            base = [{**each, "ttft_ms": each["ttft_ms"] * 1000} if each["kind"] == "row" else each for each in base]
        ran = bench(*SHORT, "--path", "direct", "--compare", written(tmp_path / "base", *base))
        assert len(lines(ran, "row", code=code)) == 2
        assert re.search(rf"^{word} +decode_tok_s", ran.err, re.MULTILINE)
        assert ("of 2 figures are worse by more than they may" in ran.err) is (code == 1)
        told = " ".join(ran.err.split())
        assert allowed() in told
        assert (f"2 of 2 figures held; they may be worse by {allowed()}" in told) is (code == 0)


def test_the_gate_refuses_another_device_and_another_cell(bench: Bench, tmp_path: Path) -> None:
    """6.6: 10. Before anything is measured; a cell, before anything is loaded."""
    found = records_of(bench)
    other = [{**each, "device": "H200"} if each["kind"] == "header" else each for each in found]
    ran = bench(*SHORT, "--path", "direct", "--compare", written(tmp_path / "base", *other))
    assert (ran.code, ran.out) == (2, "")
    assert "was measured with device 'H200', this run is with " in ran.err
    base = written(tmp_path / "base", *found)
    ran = bench(*SHORT, "--path", "direct", "-n", 9, "--compare", base, model=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "has no cell of path direct, batch 1, prompt_target_len 12, max_tokens 9" in ran.err


def test_the_page_names_options_and_fields_that_there_are() -> None:
    text = (ROOT / "docs/benchmarking.md").read_text(encoding="utf-8")
    said = re.findall(r"mlxcel bench-engine (.*)", text) + re.findall(r'(?:ARGS|arm [a-z0-9-]+)="([^"]*)"', text)
    options = {flag for parameter in command.params for flag in parameter.opts}
    named = {flag for line in said for flag in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line.partition("#")[0])}
    assert len(named) > 8
    assert named - {"--arm", "--out"} <= options
    fields = re.findall(r"^\| (`[^|]+`) \|", text.split("| figure | is |")[1], re.MULTILINE)
    assert {name for line in fields for name in re.findall(r"`([a-z_0-9]+)`", line)} <= named_fields("row")


def test_fields_of_a_cell_are_fields_of_its_records() -> None:
    assert set(records.SHAPE) == set(CELL)
    assert set(CELL) <= named_fields("row")


# --- on JAX -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_jax_a_warm_up_meets_every_program_of_its_cell(bench: Bench) -> None:
    """Batches of 9 rows pass through launches of 8."""
    ran = bench(
        "--backend", "jax-cuda", "--device", "cpu", "--prompt-tokens", "20,300", "--batch", "1,9", "-n", 20,
        "--repeats", 1, "--no-copy-bandwidth",
    )  # fmt: skip
    assert [row["compiles"] for row in lines(ran, "row")] == [0] * 6
