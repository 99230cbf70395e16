"""From the start of a fresh process to its first token: `seconds` asks a child, which runs this file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from random_engines import Setup, open_engine, prepare_jax

from mlxcel.core.source import NoProgress

LIMIT = 150.0
"""Seconds after which a child is ended."""
PROMPT = 16


class _Counted(NoProgress):
    """Keeps how much there is to do in a phase."""

    total: int | None = None

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self.total = total


def seconds(setup: Setup, device: str, folder: Path) -> dict[str, Any]:
    """`s` from outside, and what the child says of it. Compiled programs are kept in `folder`."""
    given = json.dumps([setup.shape, setup.context, setup.chunk, setup.small])
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, __file__, device, str(folder), given], stdout=subprocess.PIPE, text=True
    ) as child:
        ends = threading.Timer(LIMIT, child.kill)
        ends.start()
        line = child.stdout.readline() if child.stdout is not None else ""
        took = time.perf_counter() - began
        ends.cancel()
    if not line:
        raise RuntimeError(f"no token in {took:.0f} s, exit code {child.returncode}")
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"s": took, **json.loads(line), "kept_mb": kept / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("folder", type=Path)
    parser.add_argument("setup", type=json.loads)
    given = parser.parse_args()
    shape, context, chunk, small = given.setup
    marks = [time.perf_counter()]
    backend = prepare_jax(given.device, given.folder)(device=given.device, dtype="auto", deterministic=False)
    marks.append(time.perf_counter())
    bench = open_engine(Setup(shape, 1, context, chunk=chunk, small=small), backend)
    marks.append(time.perf_counter())
    counted = _Counted()
    backend.warm_up(counted)
    marks.append(time.perf_counter())
    bench.begin(bench.ids(PROMPT, 1))
    marks.append(time.perf_counter())
    names = ("import_s", "load_s", "compile_s", "first_token_s")
    phases = {name: end - start for name, start, end in zip(names, marks, marks[1:], strict=False)}
    print(json.dumps({**phases, "programs": counted.total}), flush=True)
    bench.close()


if __name__ == "__main__":
    main()
