"""What `import mlxcel` and an LLM leave as they were (docs/spec/clients.md 2.1, 2.2)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_llama

import mlxcel

STATE = """
import asyncio, gc, json, logging, multiprocessing, os, signal, sys, threading, warnings

def state():
    return {
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "root": [logging.root.level, len(logging.root.handlers), logging.root.disabled],
        "environ": dict(os.environ),
        "policy": type(asyncio.get_event_loop_policy()).__name__,
        "filters": [str(each) for each in warnings.filters if "numpy" not in str(each)],  # NumPy's own
        "start": multiprocessing.get_start_method(allow_none=True),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "hook": [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__],
        "gc": gc.isenabled(),
    }

before = state()

def assert_unchanged(now):
    changed = {key: (value, now[key]) for key, value in before.items() if now[key] != value}
    assert not changed, changed
"""


def ran(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STATE + script, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


def test_importing_does_nothing_heavy() -> None:
    """Test 1 of 2.3. A logger of ours has a handler, so that nothing is printed by itself."""
    script = """
import mlxcel
names = dir(mlxcel)
assert set(mlxcel.__all__) <= set(names), names
heavy = {"jax", "numpy", "rich", "tokenizers", "mlxcel.llm"} & set(sys.modules)
assert not heavy, heavy
mlxcel.SamplingParams(temperature=0.5)
for name in mlxcel.__all__:
    getattr(mlxcel, name)
assert "jax" not in sys.modules
assert_unchanged(state())
assert [type(each).__name__ for each in logging.getLogger("mlxcel").handlers] == ["NullHandler"]
"""
    ran(script)


def test_the_public_names() -> None:
    wanted = {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Engine", "hookimpl"}
    assert wanted <= set(mlxcel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = mlxcel.Llm


def test_an_llm_changes_nothing_of_its_process(tmp_path: Path) -> None:
    """Test 7 of 2.3: while it is open its threads are there, and nothing else."""
    script = """
from mlxcel import LLM, SamplingParams
with LLM(sys.argv[1], backend="reference-numpy") as llm:
    llm.generate("hello", SamplingParams(max_tokens=2))
    opened = state()
    ours = [name for name in opened["threads"] if not name.startswith("mlxcel")]
    assert_unchanged({**opened, "threads": ours})
assert_unchanged(state())
assert "jax" not in sys.modules
"""
    ran(script, str(write_tiny_llama(tmp_path / "tiny")))


@pytest.mark.parametrize("busy", [False, True])
def test_a_program_ends_though_it_never_closed_its_llm(tmp_path: Path, busy: bool) -> None:
    """No `atexit` that blocks: not even with a row that runs."""
    script = f"""
from mlxcel import LLM, SamplingParams
llm = LLM(sys.argv[1], backend="reference-numpy")
stream = llm.stream("hello", SamplingParams(ignore_eos=True, temperature=0))
if {busy}:
    next(stream)
print("done")
"""
    assert ran(script, str(write_tiny_llama(tmp_path / "tiny"))) == "done\n"


def test_a_program_ends_though_the_engine_stopped_with_a_lock_in_its_hands(tmp_path: Path) -> None:
    """A daemon thread ends wherever it is when Python does; a stream that is then closed must not wait for it."""
    script = """
from mlxcel import LLM, SamplingParams
llm = LLM(sys.argv[1], backend="reference-numpy")
stream = llm.stream("hello", SamplingParams(ignore_eos=True, temperature=0))
next(stream)
held = {}  # a namespace of its own: the one of the program goes when Python ends, and the stream with it
exec('''
import threading, time
from mlxcel.core.outbox import Outbox
put, inside = Outbox.put, threading.Event()

def slow(outbox, event):
    with outbox._lock:
        inside.set()
        time.sleep(0.5)
        return put(outbox, event)

Outbox.put = slow
''', held)
assert held["inside"].wait(60)
print("done")
"""
    assert ran(script, str(write_tiny_llama(tmp_path / "tiny"))) == "done\n"


def test_ctrl_c_in_a_call_leaves_the_object_usable(tmp_path: Path) -> None:
    """Rows run, more prompts wait for places, and the signal meets the main thread wherever it waits."""
    script = """
import time
from mlxcel import LLM, SamplingParams
llm = LLM(sys.argv[1], backend="reference-numpy")

def press():
    while llm.stats()["scheduler"]["rows_busy"] < 4:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press).start()
try:
    llm.generate(["hello"] * 50, SamplingParams(ignore_eos=True, temperature=0))
except KeyboardInterrupt:
    print("interrupted")
print(len(llm.generate("hello", SamplingParams(ignore_eos=True, max_tokens=3))[0].outputs[0].token_ids))
print(llm.stats()["scheduler"]["rows_busy"], llm.stats()["scheduler"]["num_requests_waiting"])
llm.close()
"""
    assert ran(script, str(write_tiny_llama(tmp_path / "tiny"))) == "interrupted\n3\n0 0\n"


def test_a_process_that_was_forked_off_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    """Threads do not come along: a call must not wait for them, and an end of the copy writes no file."""
    script = """
import gc
from mlxcel import LLM, SamplingParams
from mlxcel.errors import EngineUnhealthy
kept = sys.argv[1] + ".kept"
llm = LLM(sys.argv[1], backend="reference-numpy", prompt_cache_file=kept)
short = SamplingParams(temperature=0, max_tokens=3)
before = llm.generate("hello " * 20, short)[0].outputs[0].token_ids
if (child := os.fork()) == 0:
    for call in (lambda: llm.generate("hello", short), lambda: next(llm.stream("hello", short)), llm.stats):
        try:
            call()
        except RuntimeError as error:
            print("made in another process" in str(error))
    for call in (lambda: llm._client._serving.scheduler.submit(None), llm._client._serving.stats):
        try:
            call()
        except EngineUnhealthy as error:
            print("forked off" in str(error))
    llm.close()
    llm.close()
    del llm
    gc.collect()
    print(os.path.exists(kept), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
print(llm.generate("hello " * 20, short)[0].outputs[0].token_ids == before)
llm.close()
print(os.path.exists(kept))
"""
    said = ran(script, str(write_tiny_llama(tmp_path / "tiny"))).split()
    assert said == ["True"] * 5 + ["False", "0", "True", "True"]
