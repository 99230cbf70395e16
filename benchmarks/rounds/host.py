"""What disturbs a measurement on this host."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rounds import gpus, processes
from rounds.gpus import GpuState
from rounds.processes import Process

BUSY = (
    *("cc1", "cc1plus", "clang*", "ld", "lld*", "ld.lld", "rustc", "cargo", "nvcc", "cicc", "ptxas", "nvlink", "tsc"),
    *("mlxcel", "llama-*", "ollama*", "vllm", "VLLM*", "sglang*", "text-generation*", "trtllm*", "mlx_lm*"),
)
"""Compilers, and programs that run models; `*` stands for any letters."""


@dataclass(frozen=True)
class Sample:
    """The host at one moment. What cannot be read is None."""

    load_per_core: float
    processes: tuple[Process, ...] | None
    gpus: GpuState | None


@dataclass(frozen=True)
class Watch:
    """`most_load` a core, names that count as busy, and the GPUs that this run sees (their CUDA_VISIBLE_DEVICES)."""

    most_load: float
    busy: tuple[str, ...]
    visible: str | None
    take: Callable[[], Sample]
    environment: Callable[[int], tuple[bool, str | None]] = processes.visible_devices

    def __call__(self) -> list[str]:
        """Names of what is busy."""
        sample = self.take()
        found = []
        if sample.load_per_core >= self.most_load:
            found.append(f"load {sample.load_per_core:.2f} a core")
        listed = sample.processes or ()
        own = processes.own(listed)
        for process in listed:
            if process.pid not in own and (name := self._busy_name(process)) and not self._elsewhere(process, sample):
                found.append(name)
        if sample.gpus is not None:
            seen = gpus.chosen(self.visible, sample.gpus.gpus)
            found += [
                f"{user.name} on {user.uuid}" for user in sample.gpus.users if user.uuid in seen and user.pid not in own
            ]
            found += [
                f"{gpu.uuid} throttled: {', '.join(gpu.throttled)}"
                for gpu in sample.gpus.gpus
                if gpu.uuid in seen and gpu.throttled
            ]
        return list(dict.fromkeys(found))

    def reads(self) -> dict[str, Any]:
        """What of the host can be read: the GPUs of this run (None: none can), and whether processes can."""
        sample = self.take()
        seen = None if sample.gpus is None else sorted(gpus.chosen(self.visible, sample.gpus.gpus))
        return {"gpus": seen, "processes": sample.processes is not None}

    def _busy_name(self, process: Process) -> str | None:
        return next((name for name in process.names if any(fnmatchcase(name, each) for each in self.busy)), None)

    def _elsewhere(self, process: Process, sample: Sample) -> bool:
        """Whether it is bound to GPUs of which this run sees none, so that a run on each does not wait for the other.
        By its environment, which its children share; by where it is, if that cannot be read."""
        if sample.gpus is None or not (ours := gpus.chosen(self.visible, sample.gpus.gpus)):
            return False
        readable, visible = self.environment(process.pid)
        if readable and visible is not None:
            theirs = gpus.chosen(visible, sample.gpus.gpus)
        else:
            theirs = frozenset(user.uuid for user in sample.gpus.users if user.pid == process.pid)
        return bool(theirs) and not theirs & ours


def take_sample() -> Sample:
    listed = processes.running()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return Sample(load, None if listed is None else tuple(listed), gpus.read_state())
