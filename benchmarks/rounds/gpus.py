"""What nvidia-smi tells of the GPUs: which there are, who is on them, and why their clocks are held down."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

SECONDS = 30.0
"""For one question: without persistence the driver is loaded first."""

THROTTLES = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake",
}  # fmt: skip
"""Bits of the reasons. Others are no throttling: idle, clocks that were set, and clocks kept in step with others."""

Ask = Callable[[str], str]
"""Answers one option of nvidia-smi with lines of comma-separated values. OSError where it is absent or refuses."""


@dataclass(frozen=True)
class Gpu:
    """`throttled` names why, where the clocks are held down and can be read."""

    uuid: str
    name: str
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuUser:
    uuid: str
    pid: int | None
    name: str


@dataclass(frozen=True)
class GpuState:
    """All GPUs of the host, in nvidia-smi's order, and the processes on them."""

    gpus: tuple[Gpu, ...]
    users: tuple[GpuUser, ...]


def ask(option: str) -> str:
    command = ["nvidia-smi", option, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from None
    if done.returncode:
        raise OSError(f"nvidia-smi ended with {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}")
    return done.stdout


def read_state(ask: Ask = ask) -> GpuState | None:
    """None where the state of GPUs cannot be read, because there are none or no nvidia-smi."""
    try:
        try:
            listed = ask("--query-gpu=uuid,name,clocks_throttle_reasons.active")
        except OSError:  # newer drivers have another name for it
            listed = ask("--query-gpu=uuid,name,clocks_event_reasons.active")
        running = ask("--query-compute-apps=gpu_uuid,pid,process_name")
    except OSError:
        return None
    gpus = tuple(Gpu(uuid, name, _throttles(active)) for uuid, name, active in _values(listed))
    users = tuple(
        GpuUser(uuid, int(pid) if pid.isdecimal() else None, PurePath(name).name or "a process")
        for uuid, pid, name in _values(running)
    )
    return GpuState(gpus, users) if gpus else None


def chosen(visible: str | None, gpus: Sequence[Gpu]) -> frozenset[str]:
    """UUIDs of those that a process sees whose CUDA_VISIBLE_DEVICES is `visible` (None: not set, all of them).

    As CUDA reads it: numbers, UUIDs or beginnings of them, up to the first that names no GPU. Numbers are taken in the
    order of nvidia-smi. A slice of a GPU (MIG-…) cannot be matched to its GPU: all are taken.
    """
    if visible is None:
        return frozenset(gpu.uuid for gpu in gpus)
    found = set()
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            return frozenset(gpu.uuid for gpu in gpus)
        if entry.isdecimal():
            named = list(gpus[int(entry) : int(entry) + 1])
        else:
            named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(named) != 1:
            break
        found.add(named[0].uuid)
    return frozenset(found)


def _values(text: str) -> list[list[str]]:
    """Three values a line; the last may hold commas."""
    lines = [[value.strip() for value in line.split(",", 2)] for line in text.splitlines()]
    return [line for line in lines if len(line) == 3]


def _throttles(active: str) -> tuple[str, ...]:
    try:
        bits = int(active, 16)
    except ValueError:  # "[N/A]": this GPU does not tell
        return ()
    return tuple(name for bit, name in THROTTLES.items() if bits & bit)
