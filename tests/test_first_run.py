"""A program whose first run does not end is an error that says so; a benchmark says where it stands meanwhile."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxcel_jax_cuda.first_run import await_end

ROOT = Path(__file__).parents[1]

HANGS = """
import atexit, sys, time
from mlxcel_jax_cuda.first_run import await_end

class Never:
    def is_ready(self):
        return False

atexit.register(time.sleep, 1000)  # as the clean-up of a runtime whose device hangs
print("begun")
await_end("decode, rows=8", [Never()], seconds=0.05)
"""


class Later:
    """There at the third look."""

    looks = 0

    def is_ready(self):
        self.looks += 1
        return self.looks > 2


def test_what_comes_later_is_waited_for():
    arrays = [Later(), Later()]
    await_end("decode, rows=8", arrays, seconds=20)
    assert [array.looks for array in arrays] == [3, 3]


def test_what_never_comes_ends_the_process_with_an_error():
    ran = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 3
    assert ran.stdout == "begun\n"
    assert (
        "DeviceHangs: inference backend error: program 'decode, rows=8' runs for 0.05 s and does not end" in ran.stderr
    )


def test_a_pipe_that_nobody_reads_does_not_keep_the_process():
    """What is written waits for the end in a buffer, and cannot be put there."""
    program = HANGS.replace('print("begun")', 'sys.stdin.read(); print("begun")')
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ran = subprocess.Popen([sys.executable, "-c", program], **pipes, cwd=ROOT, env=buffered)
    try:
        for pipe in (ran.stdout, ran.stderr, ran.stdin):  # it goes on behind the last
            pipe.close()
        assert ran.wait(60) == 3
    finally:
        ran.kill()
        ran.wait()


@pytest.fixture
def record(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("section_record")
    monkeypatch.setattr(found, "NOTE_SECONDS", 0.02)
    return found


def rows_that_take_long():
    time.sleep(0.2)
    yield {"what": "it"}


def test_a_long_row_says_where_it_stands(record, capfd):
    assert record.SectionRecord({}, None, 60).take("lone", rows_that_take_long(), words="lone tiny")
    told = capfd.readouterr().out
    assert "    lone tiny for 0 s: test_first_run.py:" in told
    assert "rows_that_take_long" in told
    assert told.index("rows_that_take_long") < told.index("what it")


def test_a_device_that_hangs_ends_the_run(record, capfd, monkeypatch):
    def ended(status):
        raise SystemExit(status)

    def rows():
        raise record.DeviceHangs("decode, rows=8", 60)
        yield

    monkeypatch.setattr(record.os, "_exit", ended)
    made = record.SectionRecord({}, None, 60)
    with pytest.raises(SystemExit, match="1"):
        made.take("lone", rows(), words="lone tiny")
    assert "failed: lone tiny" in capfd.readouterr().out
    assert "decode, rows=8" in made.found["failed"]["lone tiny"]
