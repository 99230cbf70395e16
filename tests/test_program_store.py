"""Compiled programs on disk: found without being traced, never in the place of another, and made anew where they are
damaged."""

import errno
import functools
import inspect
import logging
import os
import stat
import subprocess
import sys
import threading
import time

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

from mlxcel_jax_cuda import program_facts, program_store, sources
from mlxcel_jax_cuda.compile_cache import unasked
from mlxcel_jax_cuda.executables import Executables
from mlxcel_jax_cuda.launch import Shape
from mlxcel_jax_cuda.program_store import ProgramStore

DEVICE = jax.devices("cpu")[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def turned(shape, x, y):
    return jnp.sin(x) * shape.rows + jnp.cumsum(y), y


def arguments(rows=3, length=5, dtype=np.float32):
    x, y = jax.device_put((np.arange(length, dtype=dtype), np.ones(length, np.float32)), DEVICE)
    return (Shape(rows, 1, 8, 2),), (x, y)


@pytest.fixture(autouse=True)
def unwritten(monkeypatch):
    """The sources are worked on while these tests run: here they are known all the same."""
    monkeypatch.setattr(sources, "process_start", lambda: float("inf"))
    monkeypatch.setattr("mlxcel_jax_cuda.fingerprint.OWN", (*sources.OWN, __name__))
    sources._read.cache_clear()
    yield
    sources._read.cache_clear()


@pytest.fixture
def store(tmp_path, monkeypatch):
    (tmp_path / "programs").mkdir()
    monkeypatch.setattr(program_store, "program_folder", lambda: tmp_path / "programs")
    return ProgramStore.of(DEVICE)


def compiled():
    (shape,), arrays = arguments()
    with unasked():
        return turned.lower(shape, *arrays).compile()


def ran(program):
    return [np.asarray(each).tobytes() for each in program(*arguments()[1])]


def test_a_program_is_given_back_as_it_was_kept(store):
    name = store.name(turned, *arguments())
    assert store.load(name) is None
    made = compiled()
    store.keep(name, made)
    (file,) = store.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    loaded = ProgramStore.of(DEVICE).load(name)
    assert ran(loaded) == ran(made)
    x, y = arguments()[1]
    loaded(x, y)
    assert x.is_deleted()  # what was donated still is
    assert not y.is_deleted()


# --- names -----------------------------------------------------------------------------------------------------------


def other_device(**facts):
    class Device:
        platform, device_kind, id, core_count, compute_capability = "gpu", "NVIDIA H200", 0, 132, "9.0"

    device = Device()
    device.client = Client("cuda 13000")
    for name, value in facts.items():
        setattr(device, name, value)
    return device


@attrs.frozen
class Client:
    platform_version: str


DEVICES = [
    {}, {"device_kind": "NVIDIA H100"}, {"id": 1}, {"core_count": 114}, {"compute_capability": "9.1"},
    {"client": Client("cuda 12000")}, {"platform": "cpu"},
]  # fmt: skip


def test_another_device_has_other_programs(store):
    names = {ProgramStore.of(other_device(**facts)).name(turned, *arguments()) for facts in DEVICES}
    assert len(names) == len(DEVICES)
    assert store.name(turned, *arguments()) not in names
    assert store.name(turned, *arguments()) == ProgramStore.of(DEVICE).name(turned, *arguments())


@jax.jit
def straight(shape, x, y):
    return x, y


@pytest.mark.parametrize(
    "other",
    [
        (straight, *arguments()),
        (turned, *arguments(rows=4)),
        (turned, *arguments(length=6)),
        (turned, *arguments(dtype=np.int32)),
        (turned, arguments()[0], tuple(np.asarray(each) for each in arguments()[1])),
        (turned, arguments()[0], (arguments()[1],)),
        (turned, arguments()[0], arguments()[1][:1]),
        (turned, (*arguments()[0], 4), arguments()[1]),
    ],
    ids=["function", "static", "shape", "dtype", "place", "tree", "fewer", "more"],
)
def test_other_arguments_are_another_program(store, other):
    assert store.name(*other) != store.name(turned, *arguments())


WORLD = {
    "variable": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "other variable": lambda patch: patch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest"),
    "jax": lambda patch: patch.setattr(jax, "__version__", "0.0.1"),
    "jaxlib": lambda patch: patch.setattr(program_facts, "jaxlib_version", "0.0.1"),
    "distribution": lambda patch: patch.setattr(program_facts, "versions", lambda: ("numpy-1.0.dist-info",)),
    "python": lambda patch: patch.setattr("platform.python_version_tuple", lambda: ("3", "99", "0")),
    "processor": lambda patch: patch.setattr(program_facts, "_processor", lambda: ["another"]),
    "sources": lambda patch: patch.setattr(program_facts, "own_digest", lambda: "another"),
    "assertions": lambda patch: patch.setattr(program_facts, "_OPTIMISED", 1),
    "options": lambda patch: patch.setattr(program_facts, "_options", lambda: b"another"),
}


@pytest.mark.parametrize("change", WORLD.values(), ids=WORLD)
def test_another_world_has_other_programs(store, monkeypatch, change):
    name = store.name(turned, *arguments())
    change(monkeypatch)
    assert ProgramStore.of(DEVICE).name(turned, *arguments()) != name


OPTIONS = "from mlxcel_jax_cuda.program_facts import _options; print(_options().hex())"


def test_what_xla_has_read_counts_wherever_it_stood(tmp_path):
    """XLA_FLAGS may name a file, whose text changes and whose name does not."""
    flags = tmp_path / "flags"

    def options(text):
        flags.write_text(text)
        own = {**os.environ, "XLA_FLAGS": str(flags)}
        return subprocess.run(
            [sys.executable, "-c", OPTIONS], capture_output=True, text=True, env=own, check=True
        ).stdout

    assert options("--xla_cpu_enable_fast_math=true") != options("--xla_cpu_enable_fast_math=false")


def test_no_programs_are_kept_where_jax_does_not_say_what_xla_has_read(store, monkeypatch):
    monkeypatch.delattr("jaxlib.xla_client.CompileOptions")
    assert ProgramStore.of(DEVICE) is None


AROUND = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("x",), devices=[DEVICE])),
    "metadata": lambda: set_xla_metadata(something=1),
}
if all(each.kind is not each.KEYWORD_ONLY for each in inspect.signature(compute_on).parameters.values()):
    AROUND["place"] = lambda: compute_on("device_host")  # from jax 0.12 on it goes around functions alone


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_jax_is_told_on_this_thread_counts(store, around):
    name = store.name(turned, *arguments())
    with around():
        assert store.name(turned, *arguments()) != name
    assert store.name(turned, *arguments()) == name


@pytest.mark.parametrize("variable", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES", "HOME", "MLXCEL_TEST"])
def test_what_changes_no_program_does_not_count(store, monkeypatch, variable):
    name = store.name(turned, *arguments())
    monkeypatch.setenv(variable, "1")
    assert store.name(turned, *arguments()) == name


class Fails:
    def plainly(self):
        raise ZeroDivisionError


def test_programs_that_cannot_be_told_have_no_name(store):
    (shape,), arrays = arguments()
    assert store.name(turned, (shape, object()), arrays) is None
    assert store.name(turned, (shape, Fails()), arrays) is None
    assert store.name(lambda: None, (shape,), arrays) is None


# --- damage ----------------------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def turn_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def another_name(path):
    path.rename(path.with_name("0" * 64 + path.suffix))


@pytest.mark.parametrize("damage", [cut, empty, turn_a_bit, another_name])
def test_what_is_damaged_or_anothers_is_removed_with_one_warning(store, caplog, damage):
    name = store.name(turned, *arguments())
    store.keep(name, compiled())
    (file,) = store.folder.iterdir()
    damage(file)
    if damage is another_name:
        name = "0" * 64
    with caplog.at_level(logging.WARNING, "mlxcel"):
        assert store.load(name) is None
        store._path("1" * 64).write_bytes(b"more")
        assert store.load("1" * 64) is None
    assert list(store.folder.iterdir()) == []
    (told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "is damaged, and made again" in told


@pytest.mark.parametrize("absent", [True, False])
def test_what_jax_cannot_serialize_is_left_to_it_for_an_hour(store, monkeypatch, absent):
    """In a version without the calls for it, or one that refuses: programs that are not kept still have JAX's cache."""

    def refused(compiled):
        raise ValueError("no")

    if absent:
        monkeypatch.setitem(sys.modules, "jax.experimental.serialize_executable", None)
    else:
        monkeypatch.setattr("jax.experimental.serialize_executable.serialize", refused)
    store.keep(store.name(turned, *arguments()), compiled())
    (refusal,) = store.folder.iterdir()
    assert ProgramStore.of(DEVICE) is None
    os.utime(refusal, (0, 0))
    assert ProgramStore.of(DEVICE) is not None


def test_a_refusal_behind_a_loaded_program_says_nothing(store, monkeypatch):
    name = store.name(turned, *arguments())
    store.keep(name, compiled())
    assert store.load(name) is not None
    monkeypatch.setitem(sys.modules, "jax.experimental.serialize_executable", None)
    store.keep("0" * 64, compiled())
    assert [path.suffix for path in store.folder.iterdir()] == [".program"]


def test_nothing_is_kept_once_the_sources_have_changed(store, monkeypatch):
    monkeypatch.setattr(program_store, "all_unchanged", lambda: False)
    store.keep(store.name(turned, *arguments()), compiled())
    assert list(store.folder.iterdir()) == []


class Refused:
    """What a file system that takes no changes does."""

    def __call__(self, *args, **given):
        raise OSError(errno.EROFS, "Read-only file system")


def test_programs_are_found_where_nothing_can_be_written(store, monkeypatch, caplog):
    """With one warning once one would be kept; and what is damaged there stays."""
    name = store.name(turned, *arguments())
    store.keep(name, compiled())
    abandoned = store.folder / "old.begun"
    abandoned.write_bytes(b"")
    os.utime(abandoned, (0, 0))
    for call in ("utime", "unlink", "replace", "chmod"):
        monkeypatch.setattr(os, call, Refused())
    monkeypatch.setattr("tempfile.mkstemp", Refused())
    with caplog.at_level(logging.WARNING, "mlxcel"):
        store = ProgramStore.of(DEVICE)
        assert ran(store.load(name)) == ran(compiled())
        assert caplog.text == ""
        for _ in range(2):
            store.keep("0" * 64, compiled())
    assert caplog.text.count("programs are not kept") == 1
    assert "Read-only file system" in caplog.text
    (store.folder / f"{'0' * 64}.program").write_bytes(b"damaged")
    assert store.load("0" * 64) is None


def test_many_writers_leave_one_whole_program(store):
    name, made = store.name(turned, *arguments()), compiled()
    threads = [threading.Thread(target=store.keep, args=(name, made)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.folder.iterdir())) == 1
    assert ran(store.load(name)) == ran(made)


def test_those_unused_for_the_longest_time_go(store, monkeypatch):
    """And what was begun long ago and never finished. Looking for one is using it."""
    now = time.time()
    for place in range(4):
        path = store.folder / f"{place}.program"
        path.write_bytes(bytes(100))
        os.utime(path, (now - place, now - place))
    old, new = store.folder / "old.begun", store.folder / "new.begun"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    monkeypatch.setattr(program_store, "LIMIT", 250)
    ProgramStore.of(DEVICE)
    assert {path.name for path in store.folder.iterdir()} == {"0.program", "1.program", "new.begun"}


def test_a_use_counts(store):
    name = store.name(turned, *arguments())
    store.keep(name, compiled())
    (file,) = store.folder.iterdir()
    os.utime(file, (0, 0))
    assert store.load(name) is not None
    assert file.stat().st_mtime > time.time() - 60


def test_no_programs_are_kept_where_nobody_said_so_or_it_is_anothers(store, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with caplog.at_level(logging.WARNING, "mlxcel"):
        assert ProgramStore.of(DEVICE) is None
    assert "programs are not kept" in caplog.text
    monkeypatch.setattr(program_store, "program_folder", lambda: None)
    assert ProgramStore.of(DEVICE) is None


def test_a_program_that_fails_does_not_take_others_with_it(store):
    """On demand: one that has run is known to."""
    executables, (statics, arrays) = Executables(store), arguments()
    good, bad = (store.name(turned, statics, given) for given in (arrays, (arrays,)))
    for name in (good, bad):
        store.keep(name, compiled())
    executables.call(turned, (*statics, *arrays))
    with pytest.raises(TypeError):  # it takes no tuple of both
        Executables(store).call(turned, (*statics, arguments()[1]))
    assert store.load(bad) is None
    assert store.load(good) is not None
    assert not executables.doubt()
