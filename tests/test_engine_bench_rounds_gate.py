"""The gate of benchmarks/engine_bench_rounds.py, on samples that are made up and a clock that is set."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_bench_rounds_fake import BENCHMARKS, FakeProgram, read

A, B = "GPU-aaaa1111", "GPU-bbbb2222"
IDLE = "0x0000000000000001"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def wait(samples: list[list[str]], timeout: float, clock: Clock) -> Any:
    """The last sample for ever."""
    from rounds.gate import Gate

    left: Iterator[list[str]] = iter(samples)
    return Gate(lambda: next(left, samples[-1]), timeout, clock, clock.sleep).wait()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_quiet_at_once() -> None:
    clock = Clock()
    passed = wait([[]], 300, clock)
    assert (passed.wait_s, passed.reason, clock.slept) == (5, None, [5])


def test_quiet_later() -> None:
    """Two samples in a row have to be."""
    clock = Clock()
    passed = wait([["cc1"], [], ["cc1"], ["ld"], [], []], 300, clock)
    assert (passed.wait_s, passed.reason, len(clock.slept)) == (25, None, 5)


@pytest.mark.parametrize("timeout", [0.0, 3.0, 12.0, 300.0])
def test_never_quiet(timeout: float) -> None:
    clock = Clock()
    passed = wait([["load 0.90 a core", "cc1"]], timeout, clock)
    assert (passed.wait_s, passed.reason) == (timeout, "load 0.90 a core; cc1")
    assert max(clock.slept, default=0) <= 5


@pytest.mark.parametrize("timeout", [0.0, 3.0, 7.0])
def test_a_short_time_is_not_overrun(timeout: float) -> None:
    clock = Clock()
    passed = wait([[], ["cc1"], []], timeout, clock)
    assert passed.wait_s == timeout
    assert passed.reason == (None if timeout == 7 else "cc1")


def run_through(samples: list[list[str]], tmp_path: Path, *more: str) -> tuple[int, Path]:
    from rounds.gate import Gate

    folder, out, clock = tmp_path / "program", tmp_path / "out", Clock()
    folder.mkdir()
    arguments = FakeProgram(folder).arguments(out, "--arm", "a=", "--rounds", "1", *more)
    options = importlib.import_module("rounds.options").parse(arguments, "")
    left = iter(samples)
    gate = Gate(lambda: next(left), options.gate_timeout, clock, clock.sleep)
    return importlib.import_module("rounds.run").Run(options, gate, {"on": True}, {})(), out


def test_a_busy_host_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    code, out = run_through([["cc1"], ["cc1"], [], []], tmp_path, "--gate-timeout", "5")
    assert code == 0
    assert [(row["gate_wait_s"], row["gate_reason"]) for row in read(out, "row")] == [(5, "cc1"), (5, None)]
    assert read(out, "summary")[0]["busy_rounds"] == {"a": [0]}


def test_strict_stops_on_a_busy_host(tmp_path: Path) -> None:
    code, out = run_through([[], [], ["cc1"]], tmp_path, "--gate-timeout", "0", "--gate-strict")
    assert code == 3
    (failure,) = read(out, "failure")
    assert (failure["reason"], failure["arm"], failure["gate_reason"]) == ("busy host: cc1", "a-null", "cc1")
    assert len(read(out, "row")) == 1


# --- what is busy -----------------------------------------------------------------------------------------------------


def asked(**answers: str) -> Callable[[str], str]:
    """nvidia-smi: what it answers by the first words of the question, and an error for every other."""

    def ask(option: str) -> str:
        for start, answer in answers.items():
            if option.startswith(f"--query-{start.replace('_', '-')}"):
                return answer
        raise OSError(option)

    return ask


def state(first: str = IDLE, second: str = IDLE, users: str = "") -> Any:
    from rounds.gpus import read_state

    gpus = f"{A}, NVIDIA H200, {first}\n{B}, NVIDIA H200, {second}\n"
    return read_state(asked(gpu=gpus, compute_apps=users))


def busy(
    *,
    load: float = 0.1,
    processes: tuple[tuple[int, int, str], ...] = (),
    gpus: Any = None,
    visible: str | None = None,
    environments: dict[int, str | None] | None = None,
    names: tuple[str, ...] = ("cc1*", "mlxcel"),
) -> list[str]:
    from rounds.host import Sample, Watch
    from rounds.processes import Process

    listed = (Process(os.getpid(), 1, ("python",)), *(Process(pid, parent, (name,)) for pid, parent, name in processes))
    known = environments or {}
    return Watch(0.5, names, visible, lambda: Sample(load, listed, gpus), lambda pid: (pid in known, known.get(pid)))()


def test_the_load_of_a_core_is_below_its_bound() -> None:
    assert busy(load=0.49) == []
    assert busy(load=0.5) == ["load 0.50 a core"]


def test_names_from_the_list_count_and_are_all_that_is_told() -> None:
    found = busy(processes=((7000001, 1, "cc1plus"), (7000002, 1, "bash"), (7000003, 1, "cc1plus")))
    assert found == ["cc1plus"]


def test_our_own_processes_do_not_count() -> None:
    """Those that come from this one, and those that it comes from."""
    from rounds.processes import Process, own

    me = os.getpid()
    assert busy(processes=((7000001, me, "mlxcel"), (7000002, 7000001, "cc1"))) == []
    listed = [Process(*each, ("x",)) for each in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 2), (6, 99), (8, 9), (9, 8))]
    assert own(listed, 3) == {1, 2, 3, 4}


def test_another_process_on_a_gpu() -> None:
    users = f"{A}, 7000001, /usr/bin/python3, with a comma\n"
    assert busy(gpus=state(users=users)) == [f"python3, with a comma on {A}"]
    assert busy(gpus=state(users=f"{A}, [N/A], [Not Found]\n")) == [f"[Not Found] on {A}"]
    assert busy(gpus=state(users=f"{A}, {os.getpid()}, python\n")) == []


def test_clocks_that_are_held_down() -> None:
    assert busy(gpus=state(second="0x0000000000000024")) == [f"{B} throttled: power cap, heat (software)"]
    for free in ("0x0000000000000000", "0x0000000000000103", "[N/A]", "[Not Supported]"):
        assert busy(gpus=state(second=free)) == []


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, {A, B}),
        ("0", {A}),
        (" 1 , 0", {A, B}),
        (B, {B}),
        ("GPU-bbbb", {B}),
        ("", set()),
        ("-1", set()),
        ("0,-1,1", {A}),
        ("7,0", set()),
        ("GPU-", set()),
        ("none", set()),
        ("MIG-aaaa", {A, B}),
    ],
)
def test_cuda_visible_devices_says_which_gpus_are_looked_at(visible: str | None, seen: set[str]) -> None:
    from rounds.gpus import chosen

    assert chosen(visible, state().gpus) == seen
    users = f"{A}, 7000001, one\n{B}, 7000002, two\n"
    wanted = [f"{name} on {uuid}" for name, uuid in (("one", A), ("two", B)) if uuid in seen]
    assert busy(gpus=state(users=users), visible=visible) == wanted


def test_a_run_on_another_gpu_is_not_seen() -> None:
    """With its compiler, whose environment is the same; before and after it is on its GPU; throttled or not."""
    other = ((7000001, 1, "mlxcel"), (7000002, 7000001, "cc1plus"))
    gpus = state(second="0x4", users=f"{B}, 7000001, mlxcel\n")
    environments: dict[int, str | None] = {7000001: B, 7000002: "1"}
    assert busy(processes=other, gpus=gpus, visible="0", environments=environments) == []
    assert busy(processes=other, gpus=state(), visible="0", environments=environments) == []
    assert busy(processes=other, gpus=gpus, visible="1", environments=environments) == [
        *("mlxcel", "cc1plus", f"mlxcel on {B}", f"{B} throttled: power cap"),
    ]


@pytest.mark.parametrize(
    ("environment", "users", "visible", "counts"),
    [
        ({}, f"{B}, 7000001, mlxcel\n", "0", False),  # its environment is another user's: where it is tells
        ({}, "", "0", True),  # nothing tells
        ({7000001: None}, "", "0", True),  # all GPUs are its own
        ({7000001: None}, f"{B}, 7000001, mlxcel\n", "0", False),
        ({7000001: ""}, "", "0", True),  # bound to none: it works on the processor
        ({7000001: "1"}, "", "", True),  # so does this run
        ({7000001: "1"}, "", "0,1", True),
    ],
)
def test_a_model_counts_unless_it_is_bound_elsewhere(
    environment: dict[int, str | None], users: str, visible: str, counts: bool
) -> None:
    processes = ((7000001, 1, "mlxcel"),)
    found = busy(processes=processes, gpus=state(users=users), visible=visible, environments=environment)
    assert found == (["mlxcel"] if counts else [])
    assert busy(processes=processes, visible=visible, environments=environment) == ["mlxcel"]  # no nvidia-smi


def test_a_driver_that_names_the_reasons_anew() -> None:
    from rounds.gpus import read_state

    def ask(option: str) -> str:
        if "clocks_throttle_reasons" in option:
            raise OSError('Field "clocks_throttle_reasons.active" is not a valid field to query.')
        return f"{A}, NVIDIA H200, 0x8\n" if "--query-gpu" in option else ""

    found = read_state(ask)
    assert found is not None
    assert [gpu.throttled for gpu in found.gpus] == [("hardware slowdown",)]


@pytest.mark.parametrize("answers", [{}, {"gpu": "No devices were found\n", "compute_apps": ""}])
def test_without_gpus_that_can_be_read_there_is_no_gate_of_them(answers: dict[str, str]) -> None:
    from rounds.gpus import read_state

    assert read_state(asked(**answers)) is None
    assert busy(gpus=None) == []


def test_nvidia_smi_is_asked_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rounds.gpus import ask

    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --bad ] && { echo no such field; exit 2; }\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert ask("--query-gpu=uuid") == "--query-gpu=uuid --format=csv,noheader,nounits\n"
    with pytest.raises(OSError, match="ended with 2: no such field"):
        ask("--bad")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(OSError):
        ask("--query-gpu=uuid")


def proc(folder: Path, pid: int, stat: str, words: str = "", environment: bytes | None = None) -> None:
    entry = folder / str(pid)
    entry.mkdir(parents=True)
    (entry / "stat").write_text(stat)
    (entry / "cmdline").write_text(words)
    if environment is not None:
        (entry / "environ").write_bytes(environment)


def test_processes_and_the_names_they_go_by(tmp_path: Path) -> None:
    from rounds.processes import Process, running, visible_devices

    assert running(tmp_path) is None
    (tmp_path / "self").mkdir()
    proc(tmp_path, 10, "10 (a)b)(c) S 1 0", "/usr/bin/a)b)(c\0-x\0")
    proc(
        tmp_path,
        11,
        "11 (my python3) R 10 0",
        "/opt/python3\0/opt/bin/mlxcel\0serve\0",
        b"A=b\0CUDA_VISIBLE_DEVICES=1\0",
    )
    proc(tmp_path, 12, "12 (python3.12) S 10 0", "python3.12\0-m\0vllm.entrypoints\0", b"A=CUDA_VISIBLE_DEVICES=1\0")
    proc(tmp_path, 13, "13 (gone) Z 10 0")
    proc(tmp_path, 14, "14 (kworker/0:1) I 2 0")
    proc(tmp_path, 15, "15 (VLLM::EngineCor) S 10 0", "VLLM::EngineCore --x\0")
    proc(tmp_path, 16, "cut short")
    proc(tmp_path, 17, "17 (python) S 10 0", "python\0-c\0pass\0")
    assert sorted(running(tmp_path) or [], key=lambda process: process.pid) == [
        Process(10, 1, ("a)b)(c",)),
        Process(11, 10, ("my python3", "python3", "mlxcel")),
        Process(12, 10, ("python3.12", "vllm")),
        Process(14, 2, ("kworker/0:1",)),
        Process(15, 10, ("VLLM::EngineCor", "VLLM::EngineCore")),
        Process(17, 10, ("python",)),
    ]
    assert visible_devices(11, tmp_path) == (True, "1")
    assert visible_devices(12, tmp_path) == (True, None)
    assert visible_devices(10, tmp_path) == (False, None)


def test_this_host_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from rounds import gpus
    from rounds.host import BUSY, Watch, take_sample

    monkeypatch.setattr(gpus, "SECONDS", 1.0)
    sample = take_sample()
    assert sample.load_per_core >= 0
    if sample.processes is not None:
        assert os.getpid() in {process.pid for process in sample.processes}
    watch = Watch(0.5, BUSY, None, lambda: sample)
    assert watch.reads()["processes"] == (sample.processes is not None)
    assert isinstance(watch(), list)
