"""A program that prints what `mlxcel bench-engine` prints, and a run of benchmarks/engine_bench_rounds.py over it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"

PROGRAM = """
import json, os, signal, subprocess, sys, time

words = sys.argv[1:]

def value(name, default):
    return words[len(words) - 1 - words[::-1].index(name) + 1] if name in words else default

with open(os.path.join(os.path.dirname(__file__), "started.jsonl"), "a") as log:
    log.write(json.dumps([os.getpid(), words]) + "\\n")
if "--no-header" not in words:
    told = {"device": value("--device", "GPU"), "model": value("--named", "m")}
    print(json.dumps({"kind": "header", **told}), flush=True)
if "--noise" in words:
    print("a warning\\n[1, 2]\\n{\\"kind\\": \\"row\\", \\"ttft_ms\\": NaN}")
if "--child" in words:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-E", "-c", deaf], stdout=subprocess.PIPE)
    child.stdout.readline()
    with open(os.path.join(os.path.dirname(__file__), "child"), "w") as file:
        file.write(str(child.pid))
if "--deaf" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--sleep" in words:
    time.sleep(float(value("--sleep", "")))
if "--silent" not in words:
    rate = float(value("--rate", "100"))
    for length in value("--prompt-tokens", "").split(","):
        row = {"kind": "row", "path": "direct", "batch": 1, "repeat": 0, "prompt_target_len": int(length)}
        print(json.dumps({**row, "ttft_ms": 20.0, "decode_tok_s": rate, "ms_per_token": 1e3 / rate}))
for number in range(60 if "--exit" in words else 0):
    print("what went wrong", number, file=sys.stderr)
sys.exit(int(value("--exit", "0")))
"""


class FakeProgram:
    """The program in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "program.py"
        self._file.write_text(PROGRAM)

    @property
    def command(self) -> str:
        return shlex.join([sys.executable, "-S", "-E", str(self._file)])

    @property
    def started(self) -> list[tuple[int, list[str]]]:
        """Process number and words of each, in order."""
        log = self._folder / "started.jsonl"
        return [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def child(self) -> int:
        return int((self._folder / "child").read_text())

    def move_to(self, device: str) -> None:
        self._file.write_text(PROGRAM.replace('"GPU"', repr(device)))

    def arguments(self, out: Path, *more: str) -> list[str]:
        return ["--bin", self.command, "--out", str(out), "--no-gate", "--prompt-tokens", "8", *more]


def read(file: Path, kind: str | None = None) -> list[dict[str, Any]]:
    records: Sequence[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return [record for record in records if kind in (None, record["kind"])]


def lives(pid: int) -> bool:
    """A process that has ended and that nobody has asked for is none."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
