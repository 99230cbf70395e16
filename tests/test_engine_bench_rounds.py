"""benchmarks/engine_bench_rounds.py over a fake program: its arms, its schedule, its records and its exit codes."""

from __future__ import annotations

import fcntl
import importlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_bench_rounds_fake import BENCHMARKS, FakeProgram, read

Main = Callable[..., int]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def main() -> Iterator[Main]:
    """The script's own, whose handlers of signals are taken back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = [signal.getsignal(number) for number in numbers]
    yield importlib.import_module("engine_bench_rounds").main
    for number, handler in zip(numbers, kept, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def program(tmp_path: Path) -> FakeProgram:
    folder = tmp_path / "program"
    folder.mkdir()
    return FakeProgram(folder)


# --- arms and options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        ("base=", "base", ()),
        ("a.b_C-1=--chunk 512", "a.b_C-1", ("--chunk", "512")),
        ("x=--label='two words' --set k=v", "x", ("--label=two words", "--set", "k=v")),
        ("x==", "x", ("=",)),
        ("null=", "null", ()),
    ],
)
def test_an_arm_is_a_name_and_what_a_shell_would_make_of_the_rest(text: str, name: str, flags: tuple[str, ...]) -> None:
    from rounds.arms import parse_arm

    arm = parse_arm(text)
    assert (arm.name, arm.flags, arm.source) == (name, flags, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base", 'NAME="FLAGS"'),
        ("=--flag", "no name of an arm"),
        ("two words=", "no name of an arm"),
        ("a/b=", "no name of an arm"),
        ("base\n=", "no name of an arm"),
        ("base-null=", "null arms"),
        ("-null=", "null arms"),
        ("base=--label 'open", "No closing quotation"),
    ],
)
def test_a_bad_arm_is_refused_and_no_file_is_made(
    text: str, said: str, program: FakeProgram, main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(program.arguments(tmp_path / "out", f"--arm={text}"))
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "--arm is needed"),
        (["--arm=a=", "--arm=a=--x"], "two arms are named a"),
        (["--arm=a=", "--rounds=0"], "'0' is no whole number from 1 to 10000"),
        (["--arm=a=", "--rounds=99999999999"], "no whole number from 1 to 10000"),
        (["--arm=a=", "--rounds=1.5"], "'1.5' is no whole number"),
        (["--arm=a=", "--max-tokens=1"], "from 2 to"),
        (["--arm=a=", "--prompt-tokens=8,x"], "'x' is no whole number"),
        (["--arm=a=", "--run-timeout=-1"], "'-1' is no number of at least 0"),
        (["--arm=a=", "--run-timeout=nan"], "'nan' is no number"),
        (["--arm=a=", "--gate-timeout=inf"], "'inf' is no number"),
        (["--arm=a=", "--gate-load=0"], "'0' is no number above 0"),
        (["--arm=a=", "--extra='"], "No closing quotation"),
        (["--arm=a=", "--bin=no-such-program --x"], "there is no program 'no-such-program'"),
        (["--arm=a=", "--bin="], "there is no program ''"),
        (["--arm=a=", "--model=--x"], "would be taken for a flag"),
        (["--arm=a=", "--out=missing/out"], "there is no folder missing"),
        (["--arm=a=", "--summarise=FILE"], "--summarise runs nothing"),
        (["--arm=a=", "--gate-l=1"], "unrecognized arguments"),
    ],
)
def test_bad_options_are_refused_and_no_file_is_made(
    more: list[str], said: str, program: FakeProgram, main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(program.arguments(tmp_path / "out", *more))
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not program.started


def test_the_model_comes_first_and_the_flags_of_the_arm_last(program: FakeProgram, main: Main, tmp_path: Path) -> None:
    more = ["--prompt-tokens", "8", "9,10", "--max-tokens", "4", "--model", "m", "--extra", "--repeats 2"]
    assert main(program.arguments(tmp_path / "out", *more, "--arm", "a=--rate 5", "--rounds", "1")) == 0
    every = ["m", "--prompt-tokens", "8,9,10", "--max-tokens", "4", "--repeats", "2", "--rate", "5"]
    assert [words for _, words in program.started] == [every, every]


# --- schedule ---------------------------------------------------------------------------------------------------------


def test_arms_rotate_with_the_rounds() -> None:
    from rounds.arms import Arm, with_nulls
    from rounds.schedule import schedule

    arms = with_nulls([Arm(name, (f"--{name}",)) for name in "abc"], every=False)
    assert arms[3] == Arm("a-null", ("--a",), "a")
    entries = list(schedule(arms, range(4)))
    by_round = [[entry.arm.name for entry in entries if entry.round == turn] for turn in range(4)]
    assert by_round == [
        ["a", "b", "c", "a-null"],
        ["b", "c", "a-null", "a"],
        ["c", "a-null", "a", "b"],
        ["a-null", "a", "b", "c"],
    ]
    assert [entry.position for entry in entries] == [0, 1, 2, 3] * 4
    assert [entry.arm.name for entry in schedule(arms, range(5, 6))] == by_round[1]


def test_every_arm_can_have_a_null_arm() -> None:
    from rounds.arms import Arm, with_nulls

    arms = with_nulls([Arm("a", ()), Arm("b", ("--x",))], every=True)
    assert arms[2:] == [Arm("a-null", (), "a"), Arm("b-null", ("--x",), "b")]


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_run_and_the_summary_of_its_file(
    program: FakeProgram,
    main: Main,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLXCEL_PREFILL_CHUNK", "512")
    monkeypatch.setenv("MLXCEL_API_KEY", "hidden")
    out = tmp_path / "out"
    arms = ["--arm", "base=--rate 100", "--arm", "fast=--rate 110", "--rounds", "2"]
    assert main(program.arguments(out, *arms)) == 0
    printed = capsys.readouterr().out
    assert len({pid for pid, _ in program.started}) == len(program.started) == 6
    names = ["base", "fast", "base-null", "fast", "base-null", "base"]
    rates = {"base": "100", "base-null": "100", "fast": "110"}
    assert [words[-1] for _, words in program.started] == [rates[name] for name in names]

    header, *rows = read(out)[:7]
    assert header["kind"] == "header"
    assert (header["device"], header["model"], header["program"]["device"]) == ("GPU", "m", "GPU")
    assert header["arms"] == [
        {"name": "base", "flags": ["--rate", "100"]},
        {"name": "fast", "flags": ["--rate", "110"]},
    ]
    assert header["nulls"] == [{"name": "base-null", "source": "base", "flags": ["--rate", "100"]}]
    assert header["env"]["MLXCEL_PREFILL_CHUNK"] == "512"
    assert "hidden" not in out.read_text()
    assert [(row["kind"], row["arm"]) for row in rows] == [("row", name) for name in names]
    assert [(row["round"], row["position"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert {(row["exit_code"], row["gate_reason"], row["gate_wait_s"]) for row in rows} == {(0, None, 0.0)}
    summaries = read(out, "summary")
    assert len(read(out)) == 7 + len(summaries)
    assert [record["metric"] for record in summaries] == ["ttft_ms", "decode_tok_s", "ms_per_token"]
    fast = summaries[1]["deltas"]["fast"]
    assert fast["median"] == pytest.approx(10)
    assert not summaries[1]["partial"]

    assert main(["--summarise", str(out)]) == 0
    assert capsys.readouterr().out == printed
    assert importlib.import_module("rounds.summary").summarise(read(out)) == summaries
    assert len(program.started) == 6


def test_rounds_are_added_to_a_file_only_when_asked(
    program: FakeProgram, main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = program.arguments(out, "--arm", "a=", "--rounds", "2")
    assert main(arguments) == 0
    whole = out.read_text()
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "--append adds rounds" in capsys.readouterr().err
    assert out.read_text() == whole

    assert main([*arguments, "--append", "--rounds", "1"]) == 0
    assert out.read_text().startswith(whole)
    assert [(row["round"], row["arm"]) for row in read(out, "row")][4:] == [(2, "a"), (2, "a-null")]
    assert read(out, "summary")[-1]["arms"]["a"]["rounds"] == 3
    assert not read(out, "summary")[-1]["partial"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--arm", "b="], "arms is"),
        (["--null-every-arm", "--arm", "a=", "--arm", "b="], "arms is"),
        (["--arm", "a=", "--max-tokens", "4"], "max_tokens is 4, and was 128"),
        (["--arm", "a=", "--prompt-tokens", "9"], "prompt_tokens is [9], and was [8]"),
        (["--arm", "a=", "--extra", "--device CPU"], "extra is"),
    ],
)
def test_rounds_of_something_else_are_not_added(
    more: list[str], said: str, program: FakeProgram, main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(program.arguments(out, "--arm", "a=", "--rounds", "1")) == 0
    whole, started = out.read_text(), len(program.started)
    assert main(program.arguments(out, "--append", *more)) == 2
    assert said in capsys.readouterr().err
    assert (out.read_text(), len(program.started)) == (whole, started)


def test_rounds_on_another_device_are_not_added(program: FakeProgram, main: Main, tmp_path: Path) -> None:
    """It is the program that tells."""
    out = tmp_path / "out"
    assert main(program.arguments(out, "--arm", "a=", "--rounds", "1")) == 0
    whole = out.read_text()
    program.move_to("TPU")
    assert main(program.arguments(out, "--append", "--arm", "a=")) == 2
    assert out.read_text() == whole


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", '{"kind": "header"}\n', '{"kind": "header", "arms"', "\xff"])
def test_a_file_of_something_else_is_refused(text: str, main: Main, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(text, encoding="latin-1")
    assert main(["--summarise", str(other)]) == 2
    assert main(["--summarise", str(tmp_path / "missing")]) == 2


HEADER = {
    "kind": "header", "bin": ["b"], "arms": [{"name": "a", "flags": []}], "nulls": [], "rounds": 1,
    "prompt_tokens": [8], "max_tokens": 4, "extra": [],
}  # fmt: skip
ROW = {"kind": "row", "arm": "a", "round": 0, "exit_code": 0, "path": "direct", "batch": 1, "prompt_tokens": 8}


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        ({"arms": [{"name": "a"}]}, {}, "line 1: a header without arms that have flags, name"),
        ({"arms": [{"name": 1, "flags": []}]}, {}, "line 1: a header with arms whose name is no text"),
        ({"arms": []}, {}, "line 1: a header without arms and a number of rounds"),
        (
            {"nulls": [{"name": "a-null", "flags": []}]},
            {},
            "line 1: a header without nulls that have flags, name, source",
        ),
        ({"rounds": True}, {}, "line 1: a header without arms and a number of rounds"),
        ({"prompt_tokens": 8}, {}, "line 1: a header whose prompt_tokens is no list"),
        ({"max_tokens": None}, {}, "line 1: a header without max_tokens"),
        ({}, {"arm": None}, "line 2: a row without the name of an arm"),
        ({}, {"round": "0"}, "line 2: a row without the name of an arm and the number of a round"),
        ({}, {"path": ["direct"]}, "line 2: a row whose path is no single value"),
    ],
)
def test_records_of_another_version_are_refused(
    header: dict[str, Any], row: dict[str, Any], words: str, main: Main, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whoever reads them: nothing is computed from half of what they say."""
    file = tmp_path / "records"
    records = [{**HEADER, **header}, {**ROW, **row}]
    kept = [{name: value for name, value in record.items() if value is not None} for record in records]
    file.write_text("".join(json.dumps(record) + "\n" for record in kept))
    assert main(["--summarise", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_two_runs_do_not_write_one_file(
    program: FakeProgram, main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = program.arguments(out, "--arm", "a=", "--rounds", "1")
    assert main(arguments) == 0
    whole = out.read_text()
    with out.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main([*arguments, "--append"]) == 2
    assert "another run writes to" in capsys.readouterr().err
    assert out.read_text() == whole


def test_a_run_that_added_meanwhile_is_noticed(program: FakeProgram, main: Main, tmp_path: Path) -> None:
    """Rounds would have the numbers that others have."""
    out = tmp_path / "out"
    assert main(program.arguments(out, "--arm", "a=", "--rounds", "1")) == 0
    run, options = importlib.import_module("rounds.run"), importlib.import_module("rounds.options")
    asked = options.parse(program.arguments(out, "--append", "--arm", "a="), "")
    late = run.Run(asked, None, {}, {})
    with out.open("a") as other:
        other.write(json.dumps({"kind": "note"}) + "\n")
    with pytest.raises(importlib.import_module("rounds.records").Refused, match="added to it just now"):
        late()


def test_rounds_go_to_a_file_alone(program: FakeProgram, main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    """A device may have no end to read."""
    with pytest.raises(SystemExit) as stop:
        main(program.arguments(Path("/dev/full"), "--append", "--arm", "a="))
    assert stop.value.code == 2
    assert "no file that rounds can be kept in" in capsys.readouterr().err


def test_a_full_disk_ends_with_3(
    program: FakeProgram,
    main: Main,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = importlib.import_module("rounds.records")

    def begin(self: Any, *, append: bool) -> None:
        self._file = Path("/dev/full").open("a")  # noqa: SIM115 (closed where nothing can be written)

    monkeypatch.setattr(records.RecordFile, "begin", begin)
    assert main(program.arguments(tmp_path / "out", "--arm", "a=", "--rounds", "1")) == 3
    assert "cannot be written: [Errno 28]" in capsys.readouterr().err


# --- processes that fail ----------------------------------------------------------------------------------------------


def test_a_process_that_fails_stops_the_run(
    program: FakeProgram, main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(program.arguments(out, "--arm", "a=", "--arm", "bad=--exit 7")) == 3
    assert "what went wrong 59" in capsys.readouterr().err
    assert [words[-1] for _, words in program.started] == ["128", "7"]
    (failure,) = read(out, "failure")
    assert (failure["reason"], failure["exit_code"], failure["arm"], failure["round"]) == ("exit code", 7, "bad", 0)
    assert failure["stderr"] == [f"what went wrong {number}" for number in range(20, 60)]
    assert [row["exit_code"] for row in read(out, "row")] == [0, 7]
    summaries = read(out, "summary")
    assert all(record["partial"] for record in summaries)
    assert all(list(record["arms"]) == ["a"] for record in summaries)


def test_a_process_over_its_time_stops_the_run(program: FakeProgram, main: Main, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(program.arguments(out, "--arm", "slow=--sleep 60", "--run-timeout", "0.3")) == 3
    (failure,) = read(out, "failure")
    assert (failure["reason"], failure["exit_code"], failure["arm"]) == ("timeout", None, "slow")
    assert read(out, "row") == []


def test_a_silent_process_stops_the_run(program: FakeProgram, main: Main, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(program.arguments(out, "--arm", "a=--silent --noise")) == 3
    (failure,) = read(out, "failure")
    assert (failure["reason"], failure["exit_code"]) == ("no rows", 0)
    assert failure["noise"] == ["a warning", "[1, 2]", '{"kind": "row", "ttft_ms": NaN}']


def test_a_program_that_cannot_be_started_stops_the_run(main: Main, tmp_path: Path) -> None:
    broken, out = tmp_path / "broken", tmp_path / "out"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    assert main(["--bin", str(broken), "--out", str(out), "--no-gate", "--arm", "a="]) == 3
    (failure,) = read(out, "failure")
    assert failure["reason"].startswith("not started")


def test_other_lines_beside_rows_are_no_matter(program: FakeProgram, main: Main, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(program.arguments(out, "--arm", "a=--noise --no-header", "--rounds", "1")) == 0
    assert [row["ttft_ms"] for row in read(out, "row")] == [20, 20]
    assert read(out, "header")[0]["device"] is None
    assert read(out, "failure") == []


# --- against an earlier run -------------------------------------------------------------------------------------------


@pytest.fixture
def base(program: FakeProgram, main: Main, tmp_path: Path) -> Path:
    file = tmp_path / "base"
    assert main(program.arguments(file, "--arm", "a=", "--rounds", "1", "--extra", "--rate 100")) == 0
    return file


def strict(comparison: Any) -> Any:
    """A rule of half of the time to the first token, and one percent of the rate, of prompts like those of the base."""

    def most(metric: str, prompt: int) -> float:
        return {"ttft_ms": 50.0, "decode_tok_s": 1.0}[metric] if prompt < 64 else 0.0

    return comparison.Rule(("ttft_ms", "decode_tok_s"), most, "so much", comparison.rule().loss)


@pytest.mark.parametrize(
    ("rate", "code", "said"), [("98.9", 1, "LOST"), ("99.1", 0, "0.90 % worse"), ("120", 0, "20.00 % better")]
)
def test_a_loss_above_the_threshold_ends_with_1(
    rate: str, code: int, said: str, base: Path, program: FakeProgram, main: Main, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from rounds import comparison

    rule = strict(comparison)
    monkeypatch.setattr(comparison, "rule", lambda: rule)
    capsys.readouterr()
    out = tmp_path / "out"
    more = ["--arm", "a=", "--rounds", "1", "--extra", f"--rate {rate}"]
    assert main(program.arguments(out, *more, "--compare", str(base))) == code
    printed = capsys.readouterr().out
    assert said in printed
    assert f"note: --extra is '--rate {rate}', and was '--rate 100' in the earlier rounds" in printed
    assert ("LOST" in printed) == (code == 1)
    assert "a-null: " not in printed
    assert main(["--summarise", str(out), "--compare", str(base)]) == code


@pytest.mark.parametrize(("times", "code"), [(1.4, 0), (1.6, 1)])
def test_each_figure_has_a_threshold_of_its_own(
    times: float, code: int, base: Path, main: Main, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rounds import comparison

    rule = strict(comparison)
    monkeypatch.setattr(comparison, "rule", lambda: rule)
    later = base.with_name("later")
    slower = [
        {**record, **({"ttft_ms": record["ttft_ms"] * times} if "ttft_ms" in record else {})} for record in read(base)
    ]
    later.write_text("".join(f"{json.dumps(record)}\n" for record in slower))
    capsys.readouterr()
    assert main(["--summarise", str(later), "--compare", str(base)]) == code
    printed = capsys.readouterr().out
    assert f"{100 * times - 100:.2f} % worse" in printed
    assert printed.count("LOST") == code
    assert "a loss counts of more than so much" in printed


@pytest.mark.parametrize(
    ("more", "said", "before"),
    [
        (["--arm", "b="], "no arm 'b'", True),
        (["--arm", "a=--x"], "the arm 'a' is another", True),
        (["--arm", "a=", "--prompt-tokens", "8", "9"], "no prompt of 9 tokens", True),
        (["--arm", "a=", "--max-tokens", "4"], "--max-tokens is 4", True),
        (["--arm", "a=", "--extra", "--device TPU --sleep 60"], "another device: TPU now, GPU", False),
        (["--arm", "a=", "--extra", "--named other --sleep 60"], "another model: other now, m", False),
        (["--arm", "a=", "--extra=--no-header"], "another device: None now, GPU", False),
    ],
)
def test_what_is_not_comparable_is_refused(
    more: list[str], said: str, before: bool, base: Path, program: FakeProgram, main: Main, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Before any process; device and model as soon as the first process tells them, before it has measured."""
    out, started = tmp_path / "out", len(program.started)
    assert main(program.arguments(out, *more, "--compare", str(base))) == 2
    assert said in capsys.readouterr().err
    assert len(program.started) == started + (not before)
    assert not out.exists()
