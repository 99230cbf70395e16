"""Processes of benchmarks/engine_bench_rounds.py: whatever ends them, nothing of them is left."""

from __future__ import annotations

import ast
import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engine_bench_rounds_fake import BENCHMARKS, FakeProgram, lives, read
from other_threads import PATIENCE, until

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="what lives is read from /proc")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def python(text: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", text]


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-E", "-c", {DEAF!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_a_timeout_ends_the_process_and_its_child(deaf: bool) -> None:
    from rounds.process import run

    waits = DEAF if deaf else "time.sleep(600)"
    for seconds in (0.3, 1, 4, 16):  # a busy host may not have started them in time
        lines: list[str] = []
        ended = run(python(PARENT + waits), timeout_s=seconds, on_line=lines.append, grace_s=0.2)
        if lines:
            break
    assert ended.exit_code is None
    until(lambda: not lives(int(lines[0])))


def test_a_child_does_not_outlive_the_process() -> None:
    from rounds.process import run

    lines: list[str] = []
    ended = run(python(PARENT), timeout_s=PATIENCE, on_line=lines.append)
    assert ended.exit_code == 0
    until(lambda: not lives(int(lines[0])))


def test_timeout_0_is_none() -> None:
    from rounds.process import run

    lines: list[str] = []
    ended = run(python("import time; time.sleep(0.2); print('done')"), timeout_s=0, on_line=lines.append)
    assert (ended.exit_code, lines) == (0, ["done"])


def test_lines_come_whole_and_in_order() -> None:
    """Also the last one without its end, bytes that are no text, and more than a pipe holds."""
    from rounds.process import run

    lines: list[str] = []
    many = "import os\nfor n in range(20000): print(n, 'x' * 9)\nprint(end='', flush=True)\n"
    text = many + r"os.write(1, b'\xff!\r\nend')"
    assert run(python(text), timeout_s=PATIENCE, on_line=lines.append).exit_code == 0
    assert lines == [*(f"{n} xxxxxxxxx" for n in range(20000)), "\ufffd!", "end"]


def test_the_last_lines_of_stderr_are_kept() -> None:
    from rounds.process import run

    text = "import os, sys\nfor n in range(50000): print(n, file=sys.stderr)\nos.kill(os.getpid(), 9)"
    ended = run(python(text), timeout_s=PATIENCE, on_line=lambda line: None)
    assert ended.exit_code == -signal.SIGKILL
    assert ended.errors == tuple(map(str, range(49960, 50000)))


def test_what_a_line_raises_ends_the_process() -> None:
    from rounds.process import run

    lines: list[str] = []

    def refuse(line: str) -> None:
        lines.append(line)
        raise RuntimeError(line)

    with pytest.raises(RuntimeError):
        run(python(PARENT + "time.sleep(600)"), timeout_s=PATIENCE, on_line=refuse)
    assert len(lines) == 1
    until(lambda: not lives(int(lines[0])))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """A terminal sends it to the script alone: its processes have sessions of their own."""
    folder = tmp_path / "program"
    folder.mkdir()
    program, out = FakeProgram(folder), tmp_path / "out"
    arguments = program.arguments(out, "--arm", "a=", "--arm", "b=--child --sleep 600")
    script = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "engine_bench_rounds.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    until(lambda: (folder / "child").exists() and (folder / "child").read_text())
    script.send_signal(number)
    printed, _ = script.communicate(timeout=PATIENCE)
    assert script.returncode == code
    assert "PARTIAL" in printed
    for pid in (*(pid for pid, _ in program.started), program.child):
        until(lambda pid=pid: not lives(pid))
    assert [row["arm"] for row in read(out, "row")] == ["a"]
    assert {record["partial"] for record in read(out, "summary")} == {True}


def test_a_process_is_asked_to_end_before_it_is_killed() -> None:
    from rounds.process import run

    lines: list[str] = []
    text = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('asked'))\nprint(flush=True)\n"
    for seconds in (0.3, 1, 4, 16):
        ended = run(python(text + "time.sleep(600)"), timeout_s=seconds, on_line=lines.append)
        if lines:
            break
    assert (ended.exit_code, ended.errors) == (None, ("asked",))


def test_lines_that_are_read_behind_the_end_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from rounds import process

    read_lines = process._read

    def later(*arguments: Any) -> None:
        time.sleep(0.3)
        read_lines(*arguments)

    monkeypatch.setattr(process, "_read", later)
    lines: list[str] = []
    assert process.run(python("print('one')"), timeout_s=PATIENCE, on_line=lines.append).exit_code == 0
    assert lines == ["one"]


def test_the_script_needs_nothing_but_python() -> None:
    """clients.md 7: it imports neither mlxcel nor jax, nor anything else that has to be installed."""
    files = [BENCHMARKS / "engine_bench_rounds.py", *sorted((BENCHMARKS / "rounds").glob("*.py"))]
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            found: Any = [node.module] if isinstance(node, ast.ImportFrom) else []
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else found
            names |= {name.partition(".")[0] for name in found}
    assert names - {"rounds", "__future__"} <= set(sys.stdlib_module_names)
    rule = importlib.import_module("rounds.comparison").RULE
    imports = [node for node in ast.walk(ast.parse(rule.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {getattr(node, "module", "") for node in imports} <= {"__future__", "collections.abc", "typing"}
