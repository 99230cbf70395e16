"""The frame of the program: version, volume, completion, signals, pipes, doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import Cli
from tiny_checkpoint import write_tiny_llama

from mlxcel.cli import doctor
from mlxcel.cli.main import main
from mlxcel.cli.progress import LineProgress
from mlxcel.core.source import Progress
from mlxcel.errors import CheckpointError, ServerError
from mlxcel.testing.clock import ManualClock


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    return Cli(monkeypatch, capfdbinary)


def test_version_and_no_command(cli: Cli) -> None:
    said = cli("--version")
    assert said.code == 0
    assert said.out.startswith("mlxcel ")
    assert "commit" in said.out
    assert "Python 3." in said.out
    assert cli().code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(cli: Cli, shell: str) -> None:
    ran = cli("completion", shell)
    assert ran.code == 0
    assert "_MLXCEL_COMPLETE" in ran.out


def test_completion_completes_commands(cli: Cli) -> None:
    ran = cli(_MLXCEL_COMPLETE="bash_complete", COMP_WORDS="mlxcel gen", COMP_CWORD="1")
    assert "generate" in ran.out


def test_doctor_runs_two_tokens_on_each_available_backend(cli: Cli) -> None:
    ran = cli("doctor", "--json", "--offline")
    checks = {check["name"]: check for check in json.loads(ran.out)}
    assert ran.code == 0
    assert checks["generation on reference-numpy"]["status"] == "ok"
    assert checks["generation on reference-numpy"]["detail"].startswith("2 tokens")
    assert checks["default model smollm2-135m-instruct"]["status"] == "warning"
    assert "not available" in checks["backend jax-cuda"]["detail"]
    assert checks["backend jax-cuda"]["status"] == "absent"
    assert "mlxcel[cuda13]" in checks["backend jax-cuda"]["hint"]


@pytest.mark.parametrize(
    ("plugin", "jax", "status", "words"),
    [
        (True, "0.11.2", "ok", "jax 0.11.2 with jax_cuda13_plugin"),
        (True, "0.12.0", "warning", "jax 0.12.0 with jax_cuda13_plugin was not tried on a GPU (tried: 0.11.2)"),
        (False, "0.12.0", "warning", "jax for CUDA is not installed"),
    ],
)
def test_doctor_tells_what_jax_a_gpu_would_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plugin: bool, jax: str, status: str, words: str
) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\n")
    monkeypatch.setattr(doctor, "_NVIDIA", tmp_path / "version")
    monkeypatch.setattr(doctor, "find_spec", lambda name: plugin and name == "jax_cuda13_plugin")
    monkeypatch.setattr(doctor, "_version", lambda name: jax)
    (check,) = doctor._gpu()
    assert (check.name, check.status) == ("gpu", status)
    assert words in check.detail
    assert (check.hint is None) == (status == "ok")


def test_doctor_says_nothing_of_gpus_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_NVIDIA", tmp_path / "version")
    assert list(doctor._gpu()) == []


def test_doctor_fails_when_a_backend_cannot_generate(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no light")

    monkeypatch.setattr("mlxcel.self_test.two_tokens", broken)
    ran = cli("doctor")
    assert ran.code == 3
    assert "failed   generation on reference-numpy: RuntimeError: no light" in ran.out


def test_commands_of_the_store_take_the_global_options(cli: Cli) -> None:
    assert cli("list", "--offline", "-q", "--backend", "reference-numpy").code == 0
    assert cli("-q", "list", "-v").code == 2


def test_lines_of_progress() -> None:
    """One line at the start and end of a phase; of a prefill only when it takes more than half a second."""
    from io import StringIO

    clock, stream = ManualClock(), StringIO()
    progress = LineProgress(stream, clock)
    progress.start("load", 3, "tensors")
    clock.advance(2)
    progress.finish()
    progress.start("prefill", 10, "tokens")
    clock.advance(0.4)
    progress.advance(5)
    progress.finish()
    assert stream.getvalue() == "loading the weights (3 tensors) ...\nloading the weights: done in 2.0 s\n"
    progress.start("prefill", 10, "tokens")
    clock.advance(0.6)
    progress.advance(5)
    progress.finish()
    assert "reading the prompt (10 tokens) ..." in stream.getvalue()


@pytest.mark.parametrize(
    ("ends", "code", "says"), [(KeyboardInterrupt(), 130, "interrupted"), (CheckpointError("no"), 3, "error: no")]
)
def test_a_terminal_has_its_cursor_back_when_a_phase_breaks_off(
    monkeypatch: pytest.MonkeyPatch, ends: BaseException, code: int, says: str
) -> None:
    """And its line is free for what is said then. Ctrl-C takes from a terminal what it has not shown yet, perhaps the
    end of the bar: the cursor is given back behind all of it."""
    from io import StringIO

    def breaks_off(config: object, plugins: object, progress: Progress, **others: object) -> None:
        progress.start("load", 3, "tensors")
        progress.advance(1)
        raise ends

    monkeypatch.setenv("TERM", "xterm")
    screen = StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("mlxcel.load.load_model", breaks_off)
    assert main(["generate", "-p", "x"]) == code
    hides, shows = "\x1b[?25l", "\x1b[?25h"
    before, said, _ = screen.getvalue().rpartition(says)
    assert said == says
    assert before.count(hides) == 1
    assert before.endswith(f"\x1b[2K{shows}")


@pytest.mark.parametrize(
    ("status", "hint"),
    [(503, "ask again in a moment"), (500, "the server's log may say why"), (None, "the server's log may say why")],
)
def test_a_failure_of_another_server_is_not_looked_for_here(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, status: int | None, hint: str
) -> None:
    def fails(*arguments: object) -> None:
        raise ServerError("Loading model", status=status)

    monkeypatch.setattr("mlxcel.tools.bench_serve.bench_serve", fails)
    ran = cli("bench", "serve")
    assert (ran.code, ran.err) == (3, f"error: Loading model\nhint: {hint}\n")


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    """A reader that leaves, as `head` does: no trace, exit code 0. UTF-8 whatever the locale."""
    model = write_tiny_llama(tmp_path / "tiny")
    arguments = [sys.executable, "-m", "mlxcel", "generate", str(model), "--raw", "-p", "hello", "-n", "400"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    said = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait() == 0
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_a_second_interrupt_ends_at_once() -> None:
    script = """
import os, signal
from mlxcel.cli.interrupts import two_interrupts
with two_interrupts():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("first", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "first\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
