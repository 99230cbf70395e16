"""Where a prompt cache file may lie (docs/spec/engine.md 8.1): links, pipes, folders, names that cannot be."""

import fcntl
import os
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest
from cache_rows import caching, ids_of
from tiny_checkpoint import write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.errors import CacheFileError
from mlxcel.load import load_model
from mlxcel.plugins.kv.cache_file import read_cache_file, remove_unfinished
from mlxcel.plugins.kv.whole_file import remove_left_behind, replace_whole
from mlxcel.plugins.manager import PluginManager


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path):
    """A pipe, which would be waited for, and a folder."""
    made, pipe = caching(), tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(CacheFileError, match="it is no file"):
            made.cache.load(made.engine, path)
        with pytest.raises(CacheFileError, match="what is there is no file"):
            made.cache.save(made.engine, path)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_one(tmp_path):
    made, link = caching(), tmp_path / "link"
    link.symlink_to(tmp_path / "kept")
    made.run(ids_of(40))
    for _ in range(2):
        made.cache.save(made.engine, link)
    assert link.is_symlink()
    assert len(read_cache_file(tmp_path / "kept")) == 1


def test_a_name_that_no_file_can_have_is_a_warning_at_the_end(tmp_path, caplog):
    """Spec 8.1: never a start that fails."""
    options = {
        "model": str(write_tiny_llama(tmp_path / "tiny")),
        "backend": "reference-numpy",
        "prompt_cache_file": str(tmp_path / ("x" * 300)),
    }
    config = EngineConfig.resolve(options, environ={})
    with load_model(config, PluginManager.load(only=(), trace=None), NoProgress(), scheduled=True):
        assert not caplog.records
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# --- what a kill leaves -----------------------------------------------------------------------------------------------

WRITES = """
import pathlib, sys, time
from mlxcel.plugins.kv.whole_file import replace_whole

def write(file):
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
    file.write(b" and half")

replace_whole(pathlib.Path(sys.argv[1]), write)
"""


@contextmanager
def writing(target):
    """A process that is in the middle of it."""
    command = [sys.executable, "-c", WRITES, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


def parts(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".part"))


def test_h_k11_what_a_kill_leaves_goes_at_the_next_start_and_what_lives_stays(tmp_path):
    """docs/spec/clients.md 3.11: one that still writes gets to its end."""
    target, model = tmp_path / "kept", write_tiny_llama(tmp_path / "tiny")
    options = {"model": str(model), "backend": "reference-numpy", "prompt_cache_file": str(target)}
    config = EngineConfig.resolve(options, environ={})
    with writing(target) as killed, writing(target) as lives:
        killed.kill()
        killed.wait()
        assert len(parts(tmp_path)) == 2
        with load_model(config, PluginManager.load(only=(), trace=None), NoProgress(), scheduled=True):
            (left,) = parts(tmp_path)
            assert remove_left_behind(target) == []
        assert parts(tmp_path) == [left]
        lives.communicate("\n")
        assert lives.returncode == 0
    assert (target.read_bytes(), parts(tmp_path)) == (b"half and half", [])
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "name", ["kept.0123456.part", "kept.0123456789.part", "kept.0123456g.part", "other.01234567.part", "kept.part",
             "kept.01234567", "kept.01234567.part.part", "akept.01234567.part"],
)  # fmt: skip
def test_only_names_of_ones_own_are_removed(tmp_path, name):
    (tmp_path / name).touch()
    assert remove_left_behind(tmp_path / "kept") == []
    assert (tmp_path / name).exists()
    (tmp_path / "kept.01234567.part").touch()
    assert remove_left_behind(tmp_path / "kept") == [tmp_path / "kept.01234567.part"]


def test_what_is_no_file_of_ours_is_left_alone(tmp_path):
    """A folder, a pipe, and a link, which could name anybody's file."""
    (tmp_path / "precious").touch()
    (tmp_path / "kept.00000001.part").mkdir()
    os.mkfifo(tmp_path / "kept.00000002.part")
    (tmp_path / "kept.00000003.part").symlink_to(tmp_path / "precious")
    assert remove_left_behind(tmp_path / "kept") == []
    assert len(parts(tmp_path)) == 3
    assert remove_left_behind(tmp_path / "no" / "folder" / "kept") == []


def test_a_fault_while_writing_leaves_nothing(tmp_path):
    def write(file):
        file.write(b"x")
        raise KeyboardInterrupt

    (tmp_path / "kept").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        replace_whole(tmp_path / "kept", write)
    assert ((tmp_path / "kept").read_bytes(), parts(tmp_path)) == (b"before", [])


def test_a_link_has_what_was_left_beside_its_file(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far" / "kept")
    (tmp_path / "far" / "kept.01234567.part").touch()
    assert remove_unfinished(tmp_path / "link") == [tmp_path / "far" / "kept.01234567.part"]


def test_one_that_was_taken_away_before_it_could_be_locked_is_made_anew(tmp_path, monkeypatch):
    """By another process that starts in that moment."""
    real, taken = fcntl.flock, []

    def slow(handle, how):
        if not taken:
            taken.extend(tmp_path.glob("*.part"))
            taken[0].unlink()
        real(handle, how)

    monkeypatch.setattr("mlxcel.plugins.kv.whole_file.fcntl.flock", slow)
    replace_whole(tmp_path / "kept", lambda file: file.write(b"x"))
    assert len(taken) == 1
    assert ((tmp_path / "kept").read_bytes(), parts(tmp_path)) == (b"x", [])
