"""`mlxcel engine-parity` as a whole (docs/spec/clients.md 5.7): real engines agree, and one mistake each is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import parity_mistakes as mistakes
import pytest
from cli_runs import Cli
from hollow_checkpoint import LFM2, write_hollow
from planted_faults import PLANT, PLUGIN, SCRIPT
from plugin_doubles import Installer
from tiny_checkpoint import write_tiny_llama

SHORT = ("--prompt-tokens", 100, "--chunks", "32,64")
"""Several pieces of both chunks, several pages, and a hit of 75 tokens."""


FLOAT32 = 1e-4
"""Nats by which two backends may rate a token differently in float32: sums of some hundred terms in another order."""


@attrs.frozen
class Ran:
    """An exit code with what was written for programs and for people."""

    code: int
    report: dict[str, Any]
    text: str
    err: str

    def results(self, case: str | None = None) -> dict[str, list[str]]:
        """What the rows say, by group."""
        found: dict[str, list[str]] = {}
        for row in self.report["pairs"]:
            if case in (None, row["case"]):
                found.setdefault(row["group"], []).append(row["result"])
        return found

    def row(self, case: str, left: str, right: str) -> dict[str, Any]:
        (found,) = [
            row
            for row in self.report["pairs"]
            if row["case"] == case and row["left"][0] == left and row["right"][0] == right
        ]
        return dict(found)

    def stream(self, case: str, letter: str) -> dict[str, Any]:
        (found,) = [each for each in self.report["streams"] if (each["case"], each["arm"][0]) == (case, letter)]
        return dict(found)


Compare = Callable[..., Ran]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Compare:
    run = Cli(monkeypatch, capfdbinary)

    def comparing(model: Path, *arguments: object, backend: str = "reference-numpy") -> Ran:
        file = tmp_path / "parity.json"
        file.unlink(missing_ok=True)
        ran = run(
            "engine-parity", model, "--backend", backend, "--json", file, *arguments, MLXCEL_SDPA_DETERMINISTIC="1"
        )
        return Ran(ran.code, json.loads(file.read_text()) if file.exists() else {}, ran.out, ran.err)

    return comparing


@pytest.fixture
def planted(compare: Compare, third_party: Installer, model: Path) -> Compare:
    """With the planted plugins installed, on the tiny model."""
    third_party.install("planted", PLUGIN)

    def comparing(*arguments: object, backend: str = "reference-numpy") -> Ran:
        pairs = () if "--pairs" in arguments else ("--pairs", "client,storage,cache,chunk,batch")
        length = () if "-n" in arguments else ("-n", 16)
        return compare(model, *SHORT, *length, *pairs, *arguments, backend=backend)

    return comparing


def test_every_way_of_running_a_request_gives_the_same_tokens(compare: Compare, model: Path) -> None:
    """5.7: 6, 7, 8."""
    ran = compare(model, *SHORT, "-n", 16, "--expect-identical")
    assert ran.code == 0, ran.text
    groups = {"client": 1, "storage": 2, "cache": 2, "chunk": 1, "batch": 1}
    assert {row["first_other_scores"] for row in ran.report["pairs"]} == {None}
    for case in ("greedy", "seeded", "ahead"):
        assert ran.results(case) == {group: ["identical"] * rows for group, rows in groups.items()}
        hit = ran.stream(case, "e")
        assert hit["partition"]["adopted"] == [0, 75]
        assert hit["cached_tokens"] == 75
        assert hit["partition"]["pieces"] == [[75, 96, 0], [96, 100, 0]]
        assert ran.stream(case, "d")["cached_tokens"] == 0
        assert ran.stream(case, "f")["partition"]["pieces"] == [[0, 32, 0], [32, 64, 0], [64, 96, 0], [96, 100, 0]]
        assert ran.stream(case, "g")["partition"]["pieces"] == [[0, 64, 0], [64, 100, 0]]
        crowded = ran.stream(case, "h")
        assert crowded["place"] == 1
        assert crowded["rows"][1] == 4
        assert set(crowded["launches"]) == {"mixed", "decode"}
        assert all("paged" in route for route in ran.stream(case, "c")["launches"]["decode"])
    assert ran.report["level"] == "R2"
    assert ran.report["prompt_token_ids"] == ran.report["prompt_token_ids"][:100]
    streams = ran.report["streams"]
    assert len(streams) == 24
    for each in streams:
        assert len(each["token_ids"]) == len(each["top2"]) == 16
        assert each["reproduces"]
        assert each["finish_cause"] == "max_tokens"
        # What was drawn is what the sampler rated best, noise included.
        assert [best[0][0] for best in each["top2"]] == each["token_ids"]
        assert all(best[0][1] >= best[1][1] for best in each["top2"] if len(best) > 1)
    assert ran.text.count("identical (16 tokens)") == 21
    assert ran.err.count("backend: reference-numpy") == 1
    assert ran.err.count("loading the weights") == 2  # its begin and its end: once for all arms
    assert ran.stream("greedy", "a")["token_ids"] != ran.stream("seeded", "a")["token_ids"]


def test_the_json_has_the_fields_of_the_specification_and_says_what_the_table_says(
    compare: Compare, model: Path
) -> None:
    """5.7: 7."""
    ran = compare(model, *SHORT, "-n", 16, "--pairs", "client", "--cases", "greedy", "--seed", 5)
    report = ran.report
    top = (
        "tool version commit model backend device dtype level prompt_tokens prompt_token_ids n seed chunks batch "
        "gap_bound streams pairs exit_code"
    )
    assert set(top.split()) <= set(report)
    stream = "case arm token_ids top2 partition kv_storage launches cached_tokens reproduces finish_cause ms"
    pair = (
        "case group left right result first_divergent_index left_token right_token left_gap right_gap "
        "max_logprob_diff first_other_scores reason"
    )
    assert all(set(stream.split()) <= set(each) for each in report["streams"])
    assert all(set(pair.split()) == set(each) for each in report["pairs"])
    assert (report["tool"], report["n"], report["seed"], report["chunks"]) == ("engine-parity", 16, 5, [32, 64])
    assert (report["prompt_tokens"], report["batch"], report["exit_code"]) == (100, 4, 0)
    assert [each["arm"] for each in report["streams"]] == ["a:direct", "b:dense"]
    row, *sides = ran.text.splitlines()[1:4]
    assert row == "greedy  client   a:direct = b:dense: identical (16 tokens)"
    assert all("pieces 0-100; dense storage; prefill ref_dense_gather 2; decode" in side for side in sides)


def test_json_to_stdout_is_alone_there(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], model: Path
) -> None:
    run = Cli(monkeypatch, capfdbinary)
    options = ("--pairs", "client", "--cases", "greedy", "--deterministic", "--backend", "reference-numpy")
    ran = run("engine-parity", model, *SHORT, "-n", 16, *options, "--json", "-")
    assert ran.code == 0
    assert json.loads(ran.out)["exit_code"] == 0
    assert "identical (16 tokens)" in ran.err


def test_a_prompt_of_ones_own_and_one_in_the_template(compare: Compare, model: Path) -> None:
    """5.1."""
    options = ("--pairs", "client", "--cases", "greedy", "-n", 2)
    ids = compare(model, "--token-ids", "40,41,42", *options).report
    assert ids["prompt_token_ids"] == [40, 41, 42]
    raw = compare(model, "-p", "in the", *options).report["prompt_token_ids"]
    chat = compare(model, "-p", "in the", "--chat", *options).report["prompt_token_ids"]
    assert len(chat) > len(raw) > 0


def test_a_wrong_entry_of_a_page_table_shows_in_the_rows_about_storage(planted: Compare) -> None:
    ran = planted("--expect-identical", "--cases", "greedy", backend="wrong-page")
    assert ran.code == 1
    assert ran.results() == {
        "client": ["identical"],
        "storage": ["diverge", "diverge"],
        "cache": ["identical", "identical"],
        "chunk": ["identical"],
        "batch": ["identical"],
    }


def test_a_stale_entry_of_the_prompt_cache_shows_in_the_row_of_the_hit(planted: Compare) -> None:
    ran = planted("--expect-identical", "--cases", "greedy", backend="stale-entry")
    assert ran.code == 1
    assert ran.results() == {
        "client": ["identical"],
        "storage": ["identical", "identical"],
        "cache": ["identical", "diverge"],
        "chunk": ["identical"],
        "batch": ["identical"],
    }
    assert (ran.row("greedy", "d", "e")["left"], ran.row("greedy", "d", "e")["right"]) == ("d:miss", "e:hit")


def test_a_position_off_by_one_shows_in_the_row_about_chunks(planted: Compare) -> None:
    ran = planted("--expect-identical", "--cases", "greedy", backend="off-by-one")
    assert ran.code == 1
    assert ran.results() == {
        "client": ["identical"],
        "storage": ["identical", "identical"],
        "cache": ["identical", "identical"],
        "chunk": ["diverge"],
        "batch": ["identical"],
    }


def test_a_skipped_penalty_shows_in_the_crowd_and_in_the_case_that_has_penalties(planted: Compare) -> None:
    ran = planted("--expect-identical", "--sampler", "skipped-penalty", "--cases", "greedy,seeded")
    assert ran.code == 1
    assert ran.results("greedy")["batch"] == ["identical"]
    assert ran.results("seeded") == {
        "client": ["identical"],
        "storage": ["identical", "identical"],
        "cache": ["identical", "identical"],
        "chunk": ["identical"],
        "batch": ["diverge"],
    }


@pytest.mark.parametrize(
    ("mistake", "case", "group", "results"),
    [
        (mistakes.second_page, "greedy", "storage", ["diverge", "diverge"]),
        (mistakes.forgotten_chunks, "seeded", "chunk", ["diverge"]),
        (mistakes.no_breakers, "seeded", "client", ["diverge"]),
        (mistakes.forgotten_newest, "ahead", "client", ["diverge"]),
        (mistakes.stale_token, "ahead", "client", ["diverge"]),
        (mistakes.mixed_seeds, "ahead", "batch", ["diverge"]),
        (mistakes.written_while_shared, "greedy", "cache", ["identical", "diverge"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_shows_in_its_row(
    compare: Compare,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: mistakes.Mistake,
    case: str,
    group: str,
    results: list[str],
) -> None:
    mistake(monkeypatch)
    ran = compare(model, *SHORT, "--cases", case, "--pairs", group, "--expect-identical")
    assert (ran.code, ran.results()) == (1, {group: results}), ran.text


def test_kv_under_another_salt_is_none_of_the_requests(
    compare: Compare, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X2: the second case finds what the first one left, and its tokens are the same."""
    mistakes.other_salt(monkeypatch)
    ran = compare(model, *SHORT, "-n", 4, "--cases", "greedy,ahead", "--pairs", "cache")
    assert (ran.code, ran.results("greedy"), ran.results("ahead")) == (
        3,
        {"cache": ["identical", "identical"]},
        {"cache": ["failed", "failed"]},
    )
    assert "99 positions were adopted, and under the request's own salt there are 0" in ran.text


def test_scores_that_differ_are_told_where_tokens_do_not(
    compare: Compare, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.4: tokens hide a difference in bits until the day it tips a scale."""
    mistakes.last_bits(monkeypatch)
    ran = compare(model, *SHORT, "-n", 4, "--cases", "greedy", "--pairs", "batch", "--expect-identical")
    assert (ran.code, ran.results()) == (0, {"batch": ["identical"]})
    assert ran.row("greedy", "b", "h")["first_other_scores"] == 0
    assert "identical (4 tokens, scores differ from step 0)" in ran.text
    assert ran.text.endswith("1 identical, 1 with other scores\n")


def test_a_reader_that_leaves_does_not_change_what_was_found(planted: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate at the head of a pipe still fails."""

    def leave(line: str) -> None:
        raise BrokenPipeError

    left: list[bool] = []
    monkeypatch.setattr("mlxcel.cli.engine_parity.click.echo", leave)
    monkeypatch.setattr("mlxcel.cli.engine_parity.give_up_stdout", lambda: left.append(True))
    ran = planted("--cases", "greedy", "--pairs", "client", "--expect-identical", "-n", 16, backend="script")
    assert (ran.code, ran.report["exit_code"], ran.text) == (1, 1, "")
    assert left


def test_a_planted_divergence_is_named_with_its_step_its_tokens_and_both_gaps(planted: Compare) -> None:
    """5.5: without the gate a divergence is recorded and ends with 0, with it with 1."""
    options = ("--cases", "greedy", "--pairs", "client,storage")
    ran = planted(*options, backend="script")
    assert ran.code == ran.report["exit_code"] == 0
    row = ran.row("greedy", "a", "b")
    assert (row["result"], row["first_divergent_index"]) == ("diverge", PLANT)
    assert (row["left_token"], row["right_token"]) == (SCRIPT[PLANT], SCRIPT[PLANT] + 1)
    assert row["left_gap"] == row["right_gap"] == 60
    assert f"diverge@{PLANT} left={SCRIPT[PLANT]} " in ran.text
    assert planted(*options, "--expect-identical", backend="script").code == 1


def test_a_backend_without_routes_over_pages_is_no_evidence_about_pages(planted: Compare) -> None:
    """5.4, V24; 5.7: 5. Its stream is written all the same."""
    ran = planted("--cases", "greedy", "--pairs", "storage", backend="script")
    assert [(row["result"], row["reason"]) for row in ran.report["pairs"]] == [("n/a", "no paged launch")] * 2
    assert ran.code == 3  # nothing was compared
    assert ran.stream("greedy", "c")["kv_storage"] == "paged"
    assert "paged storage, no paged launch" in ran.text


def test_a_required_group_must_be_compared(planted: Compare) -> None:
    """5.5."""
    options = ("--cases", "greedy", "--pairs", "client,storage")
    assert planted(*options, "--require", "client", backend="pageless").code == 0
    ran = planted(*options, "--require", "storage", backend="pageless")
    assert ran.code == 3
    assert ran.results() == {"client": ["identical"], "storage": ["n/a", "n/a"]}
    assert {row["reason"] for row in ran.report["pairs"]} == {None, "storage refused"}
    assert ran.report["absent"][0]["detail"] == "this backend has no pages"


def test_an_arm_that_fails_ends_with_3_and_the_others_are_told(planted: Compare) -> None:
    """5.5: 3 wins over 1, and every stream that ran is written."""
    ran = planted("--cases", "greedy", "--pairs", "client,storage", "--expect-identical", backend="lost")
    assert ran.code == ran.report["exit_code"] == 3
    assert ran.results() == {"client": ["identical"], "storage": ["failed", "failed"]}
    assert "the device fell off the bus" in ran.row("greedy", "b", "c")["reason"]
    assert [each["arm"] for each in ran.report["streams"]] == ["a:direct", "b:dense"]
    assert planted("--pairs", "client", backend="broken").code == 3


def test_a_crowd_that_is_not_there_is_no_evidence(planted: Compare) -> None:
    ran = planted("--pairs", "batch", "--cases", "greedy", "--expect-identical", backend="lonely")
    assert (ran.code, ran.results()) == (3, {"batch": ["failed"]})


def test_an_interrupt_ends_it(planted: Compare) -> None:
    """5.5."""
    ran = planted("--pairs", "client", backend="interrupted")
    assert (ran.code, ran.text, ran.report) == (130, "", {})


def test_a_record_is_replaced_by_a_record_alone(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], model: Path, tmp_path: Path
) -> None:
    run, file = Cli(monkeypatch, capfdbinary), tmp_path / "record.json"
    file.write_text("an earlier record")
    options = ("--deterministic", "--backend", "reference-numpy", "--json", file, "--cases", "greedy", "-n", 2)
    assert run("engine-parity", model, *options, "--prompt-tokens", 10).code == 2
    assert file.read_text() == "an earlier record"
    assert run("engine-parity", model, *options, "--prompt-tokens", 10, "--pairs", "client").code == 0
    assert json.loads(file.read_text())["exit_code"] == 0


def test_a_record_may_go_to_what_is_no_file_and_a_full_disk_is_named(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], model: Path
) -> None:
    run = Cli(monkeypatch, capfdbinary)
    options = ("--deterministic", "--backend", "reference-numpy", "--token-ids", "40,41", "--pairs", "client", "-n", 2)
    assert run("engine-parity", model, *options, "--json", "/dev/null").code == 0
    ran = run("engine-parity", model, *options, "--json", "/dev/full")
    assert ran.code == 3
    assert "error: --json /dev/full cannot be written: No space left on device" in ran.err


def test_a_family_with_state_of_its_own_has_no_prefix_to_find(compare: Compare, tmp_path: Path) -> None:
    """5.4, X14."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_hollow(tmp_path / "lfm2", {**LFM2, **small, "vocab_size": 320})
    ran = compare(folder, *SHORT, "-n", 2, "--cases", "greedy", "--pairs", "cache,storage", "-c", 512)
    assert [(row["right"], row["result"], row["reason"]) for row in ran.report["pairs"]] == [
        ("c:paged", "identical", None),
        ("c:paged", "identical", None),
        ("d:miss", "identical", None),
        ("e:hit", "n/a", "family has no reusable prefix"),
    ]
    assert ran.code == 0


def test_pieces_are_those_that_ran(planted: Compare) -> None:
    """5.7: 5: a planner of a plugin splits as it likes."""
    ran = planted("--cases", "greedy", "--pairs", "client,chunk", "--prefill-planner", "odd", "--expect-identical")
    assert ran.code == 0
    assert ran.stream("greedy", "g")["partition"]["pieces"] == [[0, 5, 0], [5, 64, 0], [64, 100, 0]]
    assert "pieces 0-5 5-64 64-100;" in ran.text


def test_a_hit_that_adopts_nothing_is_no_evidence(compare: Compare, model: Path) -> None:
    """5.4: the reason is the cache's own."""
    options = (*SHORT, "-n", 16, "--cases", "greedy", "--pairs", "cache")
    ran = compare(model, *options, "--prompt-cache-capacity-bytes", 1, "--kv-storage", "dense")
    assert [(row["result"], row["reason"]) for row in ran.report["pairs"]] == [
        ("identical", None),
        ("n/a", "no hit (empty_set)"),
    ]
    assert ran.stream("greedy", "e")["cached_tokens"] == 0


QUICK = ("--cases", "seeded", "--pairs", "client,backend")
"""What takes few programs."""


@pytest.mark.parametrize("more", [QUICK, pytest.param((), marks=pytest.mark.slow)], ids=["quick", "all"])
def test_jax_agrees_with_itself_and_with_the_reference(compare: Compare, model: Path, more: tuple[str, ...]) -> None:
    """5.7: 8: JAX on the CPU, and the pair of backends."""
    required = ("--device", "cpu", "--expect-identical", "--require", "backend")
    ran = compare(model, *SHORT, "-n", 64, *required, *more, backend="jax-cuda")
    assert ran.code == 0, ran.text
    assert {each for results in ran.results().values() for each in results} == {"identical"}
    pairs = [row for row in ran.report["pairs"] if row["group"] == "backend"]
    assert {row["right"] for row in pairs} == {"x:reference-numpy"}
    assert all(0 <= row["max_logprob_diff"] < FLOAT32 for row in pairs)


@pytest.mark.slow
def test_the_default_model_agrees_with_itself(compare: Compare, smollm2_path: Path) -> None:
    """5.7: 8."""
    ran = compare(smollm2_path, "--prompt-tokens", 300, "--chunks", "128,256", "--expect-identical")
    assert ran.code == 0, ran.text
    assert all(set(results) == {"identical"} for results in ran.results().values())
