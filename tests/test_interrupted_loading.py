"""SIGINT and SIGTERM while a model is loaded, compiled or warmed up (docs/spec/clients.md 1.4, 3.11)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from plugin_doubles import Installer

from mlxcel.core.held_interrupts import held_interrupts

PLUGIN = """
import atexit, ctypes, signal, sys, time
from concurrent.futures import ThreadPoolExecutor

from mlxcel.core.backend import BackendSpec, Probe
from mlxcel.plugins.hookspecs import hookimpl

def probe(device):
    return Probe(available=True, reason="a test")

def native():
    "As XLA: without the interpreter, and deaf to whoever wants it to end."
    ctypes.CDLL(None).sleep(600)

def begun():
    atexit.register(print, "Python ended under native code", file=sys.stderr)
    print("compiling", file=sys.stderr, flush=True)

def in_a_pool():
    pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcel-compile")
    try:
        running = pool.submit(native)
        begun()
        running.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

def directly():
    begun()
    native()

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def in_a_finalizer():
    begun()
    Finalized()
    time.sleep(600)

def in_a_text():
    begun()
    exec("signal.raise_signal(signal.SIGINT)")

def maker(when, work):
    def make(*, device, dtype, deterministic):
        from mlxcel.testing.scripted import ScriptedBackend

        class Stuck(ScriptedBackend):
            def load(self, *given):
                if when == "load":
                    work()
                super().load(*given)

            def warm_up(self, progress):
                progress.start("compile", 1, "programs")
                if when == "compile":
                    work()

            def prepare_steps(self, calls, progress):
                if when == "prepare":
                    work()

            def submit(self, plan):
                if when == "warm-up":
                    work()
                return super().submit(plan)

        return Stuck(lambda spec: [65, 65, 65, 65])
    return make

load_directly = maker("load", directly)
compile_directly = maker("compile", directly)
warm_up_directly = maker("warm-up", directly)
prepare_in_a_pool = maker("prepare", in_a_pool)
load_in_a_pool = maker("load", in_a_pool)
compile_in_a_pool = maker("compile", in_a_pool)
load_in_a_finalizer = maker("load", in_a_finalizer)
load_in_a_text = maker("load", in_a_text)

NAMES = [name for name in globals() if name.startswith(("load_", "compile_", "prepare_", "warm_up_"))]

@hookimpl
def mlxcel_backends():
    return [
        BackendSpec(name.replace("_", "-"), "is stuck", f"{__name__}:{name}", priority=-1,
                    probe_target=f"{__name__}:probe")
        for name in NAMES
    ]
"""

PROGRAM = """
import sys
from mlxcel.cli import leaving
from mlxcel.cli.start import main
leaving.PATIENCE = 0.1
sys.exit(main())
"""

PATIENT = """
import sys
from mlxcel.cli import leaving
from mlxcel.cli.start import main
leaving.PATIENCE, busy = 600, leaving._still_busy

def still_busy():
    print("waiting", file=sys.stderr, flush=True)
    return busy()

leaving._still_busy = still_busy
sys.exit(main())
"""
"""Says when it begins to wait for its threads, and waits for as long as they take."""

SERVE = ("serve", "tiny", "--port", "0")
LONG = 120.0
"""Seconds that a test waits for an end: less than what is stuck takes."""


@pytest.fixture
def stuck(third_party: Installer) -> Path:
    third_party.install("stuck", PLUGIN)
    return third_party.folder


@contextmanager
def begun(folder: Path, backend: str, *arguments: str, program: str = PROGRAM) -> Iterator[subprocess.Popen[str]]:
    """The program, once its backend is stuck."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--backend", backend],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert process.stderr is not None
    said: list[str] = []
    limit = threading.Timer(LONG, process.kill)
    limit.start()
    try:
        for line in process.stderr:
            said.append(line)
            if line == "compiling\n":
                break
        assert said[-1:] == ["compiling\n"], said
        yield process
    finally:
        limit.cancel()
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, what it said on stdout, and on stderr from now on."""
    assert process.stderr is not None
    assert process.stdout is not None
    rest = process.stderr.read()
    return process.wait(), process.stdout.read(), rest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("backend", ["load-directly", "compile-in-a-pool", "warm-up-directly"])
def test_h_s3_a_server_that_loads_ends_with_0(stuck: Path, backend: str, number: signal.Signals) -> None:
    """3.11: without a word, and without Python's end under native code."""
    with begun(stuck, backend, *SERVE) as process:
        process.send_signal(number)
        assert end(process) == (0, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_h_s3_a_second_signal_ends_a_server_that_loads_at_once(stuck: Path, number: signal.Signals, code: int) -> None:
    with begun(stuck, "compile-directly", *SERVE, program=PATIENT) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting\n"
        process.send_signal(number)
        assert end(process) == (code, "", "")


@pytest.mark.parametrize("backend", ["load-in-a-pool", "load-in-a-finalizer", "load-in-a-text"])
@pytest.mark.parametrize(
    "arguments",
    [("generate", "tiny", "-p", "a"), ("run", "tiny", "-p", "a"), ("bench-engine", "tiny", "--prompt-tokens", "8")],
    ids=["generate", "run", "bench-engine"],
)
def test_h_s1_an_interrupted_load_ends_with_130(stuck: Path, arguments: tuple[str, ...], backend: str) -> None:
    """1.4: one line, wherever the interrupt was raised: where Python waits for another thread, where it ignores errors,
    and where it remembers an interrupt for its own end."""
    with begun(stuck, backend, *arguments) as process:
        if backend == "load-in-a-pool":
            process.send_signal(signal.SIGINT)
        assert end(process) == (130, "", "interrupted\n")


def test_h_s1_an_interrupt_while_steps_are_prepared_ends_with_130(stuck: Path) -> None:
    """1.4: the row ends as in any of its steps, and what compiles is left to itself."""
    with begun(stuck, "prepare-in-a-pool", "generate", "tiny", "-p", "a") as process:
        process.send_signal(signal.SIGINT)
        code, _, told = end(process)
    assert (code, "0 tokens · cancelled" in told, "Python ended" in told) == (130, True, False)


def test_h_s1_a_second_interrupt_ends_the_wait_for_threads(stuck: Path) -> None:
    with begun(stuck, "load-in-a-pool", "generate", "tiny", "-p", "a", program=PATIENT) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert [process.stderr.readline() for _ in range(2)] == ["interrupted\n", "waiting\n"]
        process.send_signal(signal.SIGINT)
        assert end(process) == (130, "", "")


# --- held interrupts --------------------------------------------------------------------------------------------------


def held(count: int, reached: list[str], error: Exception | None = None) -> None:
    """Interrupts of this number inside."""
    with held_interrupts():
        for _ in range(count):
            signal.raise_signal(signal.SIGINT)
            reached.append("inside")
        if error is not None:
            raise error


@pytest.mark.parametrize("count", [1, 2])
def test_one_interrupt_is_held_to_the_end_and_a_second_is_not(count: int) -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        held(count, reached)
    assert reached == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_does_not_hide_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        held(1, [], ZeroDivisionError())
    assert isinstance(caught.value.__context__, ZeroDivisionError)


TWICE = """
import signal
from mlxcel.cli.interrupts import two_interrupts
from mlxcel.core.held_interrupts import held_interrupts
with two_interrupts(), held_interrupts():
    signal.raise_signal(signal.SIGINT)
    print("held", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("held again", flush=True)
"""


def test_h_s1_a_second_interrupt_ends_the_program_though_the_first_is_held() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stdout, done.stderr) == (130, "held\n", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
