"""Records of `mlxcel bench-engine` made by hand, and backends that make its runs go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plugin_doubles import HEADER

BACKEND = """
from mlxcel.core.backend import Compilations, Probe
from mlxcel_reference_numpy.backend import NumpyBackend

@hookimpl
def mlxcel_backends():
    return [BackendSpec("odd", "odd", f"{__name__}:Odd", priority=-1, probe_target=f"{__name__}:there")]

def there(device):
    return Probe(available=True, reason="a test")
"""

COMPILING = (
    HEADER
    + BACKEND
    + """
class Odd(NumpyBackend):
    steps = 0

    @property
    def compilations(self):
        return Compilations(3, max(0, self.steps - 2))

    def submit(self, plan):
        self.steps += 1
        return super().submit(plan)
"""
)
"""Compiles a program in each step behind the second, which is the last one of a warm-up of two tokens."""

ROUTELESS = (
    HEADER
    + BACKEND
    + """
import attrs

class Odd(NumpyBackend):
    def submit(self, plan):
        return attrs.evolve(super().submit(plan), routes={"something_else": 1})
"""
)
"""Never launches a paged route, whatever it is given."""

FAILING = (
    HEADER
    + BACKEND
    + """
class Odd(NumpyBackend):
    steps = 0

    def submit(self, plan):
        self.steps += 1
        if self.steps > 3:
            raise RuntimeError("the device is gone")
        return super().submit(plan)
"""
)

INTERRUPTED = (
    HEADER
    + BACKEND
    + """
import os, signal

class Odd(NumpyBackend):
    steps = 0

    def submit(self, plan):
        self.steps += 1
        if self.steps == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return super().submit(plan)
"""
)
"""Somebody presses Ctrl-C in the first timed run."""

BORED = (
    HEADER
    + """
@hookimpl
def mlxcel_finish_steps():
    return [Named("boredom", "ends", f"{__name__}:Boredom")]

class Boredom:
    def open(self, spec):
        return None

    def check(self, state, output, text):
        return True if len(output) == 5 else None
"""
)
"""Ends every reply with its fifth token."""

DEVICE = {
    "device": "H200", "backend": "jax-cuda", "level": "R0", "dtype": "bfloat16", "model": "m", "quantisation": "none",
    "params": 7,
}  # fmt: skip
CELL = {
    "path": "direct", "batch": 1, "prompt_target_len": 256, "max_tokens": 128, "sampling": "greedy",
    "prefill_chunk": 2048, "kv_storage_asked": "auto",
}  # fmt: skip


def header(**changed: Any) -> dict[str, Any]:
    return {"kind": "header", "tool": "bench-engine", **DEVICE, **changed}


def row(ttft_ms: float = 10.0, decode_tok_s: float = 500.0, **changed: Any) -> dict[str, Any]:
    return {"kind": "row", **CELL, "ttft_ms": ttft_ms, "decode_tok_s": decode_tok_s, **changed}


def written(file: Path, *records: dict[str, Any]) -> str:
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(file)
