"""The processes of this host, by their names, as /proc tells them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

PROC = Path("/proc")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Process:
    """`names` are those it may be known by: its own, its program's, and of an interpreter the script's or module's."""

    pid: int
    parent: int
    names: tuple[str, ...]


def running(folder: Path = PROC) -> list[Process] | None:
    """All that live; None where the system does not tell."""
    if not (folder / "self").exists():
        return None
    found = []
    for entry in folder.iterdir():
        if entry.name.isdecimal():
            try:
                process = _read(entry)
            except (OSError, ValueError, IndexError):  # it has ended since
                continue
            found += [process] if process is not None else []
    return found


def own(processes: Sequence[Process], pid: int | None = None) -> frozenset[int]:
    """This process, those that it comes from, and all that come from it."""
    pid = os.getpid() if pid is None else pid
    parents = {process.pid: process.parent for process in processes}

    def line(child: int) -> list[int]:
        """The process and its parents, the next one first. No process comes from itself, but a list made while
        processes end may say so."""
        found = [child]
        while (parent := parents.get(found[-1], 0)) > 0 and parent not in found:
            found.append(parent)
        return found

    return frozenset(line(pid)) | {each for each in parents if pid in line(each)}


def visible_devices(pid: int, folder: Path = PROC) -> tuple[bool, str | None]:
    """Whether the environment of a process can be read, and its CUDA_VISIBLE_DEVICES, None if not set."""
    try:
        variables = (folder / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False, None
    found: Mapping[str, str] = dict(_pair(each) for each in variables)
    return True, found.get(VISIBLE)


def _read(entry: Path) -> Process | None:
    name, _, rest = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    if state in "ZX":
        return None
    words = [word for word in (entry / "cmdline").read_text(errors="replace").split("\0") if word]
    return Process(int(entry.name), int(parent), tuple(dict.fromkeys([name, *_program(words)])))


def _program(words: Sequence[str]) -> list[str]:
    if not words:  # a thread of the kernel
        return []
    program = PurePath(words[0].split(" ")[0]).name  # some write a title over their words
    if not program.startswith("python"):
        return [program]
    if "-m" in words[1:-1]:
        return [program, words[words.index("-m") + 1].partition(".")[0]]
    return [program, *(PurePath(word).name for word in words[1:2] if not word.startswith("-"))]


def _pair(variable: bytes) -> tuple[str, str]:
    name, _, value = variable.decode(errors="replace").partition("=")
    return name, value
