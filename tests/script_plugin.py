"""A plugin of the tests: a backend that says what its prompt says between "<<" and ">>", for each choice its own part.

The parts are separated by "|"; a prompt without the marks is said as it is. "@N" in a part is the token id N, once. At
"!" its row fails.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from other_threads import PATIENCE

from mlxcel.core.backend import BackendSpec, Probe
from mlxcel.core.named import Named
from mlxcel.core.plan import StepPlan, StepResult
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.hookspecs import hookimpl
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.scripted import ScriptedBackend


class Gate:
    """While it is shut the backend's forwards wait, all but the first few. `waited` is set once one does."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waited = threading.Event()
        self._free = 0
        self.open.set()

    def shut(self, after: int = 0) -> None:
        self._free = after
        self.waited.clear()
        self.open.clear()

    def wait(self) -> None:
        if self._free:
            self._free -= 1
        elif not self.open.is_set():
            self.waited.set()
            self.open.wait(PATIENCE)


GATE = Gate()


def script(spec: SequenceSpec) -> list[int]:
    said = bytes(int(token) for token in spec.prompt_ids if token < 256)
    start, end = said.find(b"<<"), said.rfind(b">>")
    if 0 <= start < end:
        said = said[start + 2 : end]
    parts = said.split(b"|")
    ids: list[int] = []
    for piece in re.split(rb"(@[0-9]+)", parts[spec.choice % len(parts)]):
        ids += [int(piece[1:])] if re.fullmatch(rb"@[0-9]+", piece) else list(piece)
    return [*ids, EOS, EOS]  # one step may be ahead


class GatedBackend(ScriptedBackend):
    def submit(self, plan: StepPlan) -> StepResult:
        GATE.wait()
        return super().submit(plan)


class Tripwire:
    """Fails a row at a "!"."""

    def open(self, spec: SequenceSpec) -> None:
        return None

    def check(self, state: None, output: list[int], text: str) -> None:
        if output[-1] == ord("!"):
            raise ValueError("tripped")


def probe(device: str) -> Probe:
    return Probe(available=True, reason="a script")


def backend(*, device: str, dtype: str, deterministic: bool) -> Any:
    return GatedBackend(script)


@hookimpl
def mlxcel_backends() -> list[BackendSpec]:
    return [BackendSpec("script", "says", f"{__name__}:backend", priority=-1, probe_target=f"{__name__}:probe")]


@hookimpl
def mlxcel_finish_steps() -> list[Named]:
    return [Named("tripwire", "fails", f"{__name__}:Tripwire")]
