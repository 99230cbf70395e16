"""What JAX is told before it starts, its compiled programs on disk, and the device it runs on (hand cases H-Q1, H-Q5,
H-Q7)."""

from __future__ import annotations

import ast
import ctypes
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import pytest
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.backend import BackendSettings, DeviceMemory
from mlxcel.errors import CapacityError, DeviceError, UsageError
from mlxcel_jax_cuda import compile_cache, driver, runtime
from mlxcel_jax_cuda.device import (
    DeviceFacts,
    choose_device,
    compute_dtype,
    device_facts,
    device_memory,
    enough_memory,
)

ROOT = Path(__file__).parent.parent
GIB = 1 << 30

STAND_IN = """
import os
names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS",
         "TF_CPP_MIN_LOG_LEVEL")
print(" ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ), flush=True)
os._exit(9)
"""
"""A jax that tells what it could read when it was imported, and ends."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`python ARGUMENTS` without any of the variables concerned but those given."""

    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "TF_", "MLXCEL_"))
        }
        own |= {"MLXCEL_CACHE_DIR": str(tmp_path / "cache"), **variables}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=own, cwd=tmp_path, timeout=120)

    return run


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A folder for PYTHONPATH with a jax that tells, and a flax that is there."""
    for name, text in (("jax", STAND_IN), ("flax", ""), ("jax_cuda13_plugin", "")):
        (tmp_path / "lib" / name).mkdir(parents=True)
        (tmp_path / "lib" / name / "__init__.py").write_text(text)
    return str(tmp_path / "lib")


# --- before it is imported -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "variables", "seen"),
    [
        (("cpu", 0.9), {}, "JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=2"),
        (
            ("cpu", None),
            {"JAX_PLATFORMS": "cuda", "TF_CPP_MIN_LOG_LEVEL": "0"},
            "JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=0",
        ),
        (("auto", 0.9), {}, "XLA_PYTHON_CLIENT_MEM_FRACTION=0.900000 JAX_PLATFORMS=cuda,cpu TF_CPP_MIN_LOG_LEVEL=2"),
        (
            ("cuda:1", 0.25),
            {"XLA_CLIENT_MEM_FRACTION": "0.5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.250000 XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu "
            "TF_CPP_MIN_LOG_LEVEL=2",
        ),
        (("cuda", None), {}, "XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu TF_CPP_MIN_LOG_LEVEL=2"),
    ],
)  # fmt: skip
def test_h_q1_variables_are_set_when_jax_is_imported(
    run: Run, stand_in: str, settings: tuple[str, float | None], variables: dict[str, str], seen: str
) -> None:
    """A share of a name of the same meaning gives way; the user's own word on how much is said, and when memory is
    taken, stays."""
    done = run("-c", PREPARE, *map(repr, settings), None, PYTHONPATH=stand_in, **variables)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (9, seen, "")


PREPARE = """
import sys
from mlxcel.core.backend import BackendSettings, DeviceMemory
from mlxcel_jax_cuda import driver, runtime
device, share, memory = map(eval, sys.argv[1:])
driver.device_memory = lambda number: memory and DeviceMemory(*memory[number])
runtime.prepare(BackendSettings(device, share, None))
"""


@pytest.mark.parametrize(
    ("device", "free", "share"), [("cuda", 97, "0.900000"), ("cuda:1", 40, "0.392000"), ("auto", 91, "0.891800")]
)
def test_v18_jax_takes_no_more_than_other_programs_leave(
    run: Run, stand_in: str, device: str, free: int, share: str
) -> None:
    """Of the device asked for: a share that is not there would be found by failing, a tenth at a time. A part of
    what is free stays for the libraries under JAX."""
    memory = [(100, free), (100, free)] if device != "cuda:1" else [(100, 97), (100, free)]
    done = run("-c", PREPARE, repr(device), 0.9, memory, PYTHONPATH=stand_in)
    assert done.stdout.startswith(f"XLA_PYTHON_CLIENT_MEM_FRACTION={share} "), done.stderr


@pytest.mark.parametrize("arguments", [("--gpu-memory-utilization", "0.3"), ()])
def test_h_q1_the_command_line_sets_them_before_jax_is_imported(
    run: Run, stand_in: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """By the flag and by the variable; `--help` and `import mlxcel` import no jax."""
    model = write_tiny_llama(tmp_path / "m")
    assert run("-m", "mlxcel", "generate", "--help", PYTHONPATH=stand_in).returncode == 0
    assert run("-c", "import mlxcel; mlxcel.LLM", PYTHONPATH=stand_in).returncode == 0
    start = ("-c", GPU_MACHINE, "generate", model, "-p", "x", "--backend", "jax-cuda", *arguments)
    done = run(*start, PYTHONPATH=stand_in, MLXCEL_MEMORY_FRACTION="0.7")
    share = "0.300000" if arguments else "0.700000"
    assert done.stdout.startswith(f"XLA_PYTHON_CLIENT_MEM_FRACTION={share} JAX_PLATFORMS=cuda,cpu "), done.stderr
    done = run("-m", "mlxcel", *start[2:], "--device", "cpu", PYTHONPATH=stand_in)
    assert done.stdout.startswith("JAX_PLATFORMS=cpu "), done.stderr


CHOSEN = """
import sys
from mlxcel.choose_backend import choose_backend
from mlxcel.config import EngineConfig
from mlxcel.plugins.manager import PluginManager
config = EngineConfig.resolve({"backend": "jax-cuda", "device": "cpu", "dtype": sys.argv[1]})
chosen = choose_backend(config, PluginManager.load(only=(), trace=None))
print(chosen.line)
print(chosen.backend.memory(), chosen.backend.caps.platform)
"""


@pytest.mark.parametrize(
    ("asked", "dtype"), [("auto", "float32"), pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow)]
)
def test_h_q7_the_line_at_the_start_names_platform_and_device(run: Run, asked: str, dtype: str) -> None:
    done = run("-c", CHOSEN, asked)
    line, facts = done.stdout.splitlines()
    assert line.startswith(f"backend: jax-cuda (asked for by --backend: JAX {jax.__version__} on XLA:CPU"), done.stderr
    assert line.endswith(f"), on cpu: XLA:CPU, {dtype}")
    assert facts == "None cpu"


GPU_MACHINE = """
from mlxcel_jax_cuda import driver, probe
driver.device_memory = lambda number: None
probe.has_driver, probe.gpus, probe.cuda_version = lambda: True, lambda: ("a GPU",), lambda: "13.0"
from mlxcel.cli.start import main
raise SystemExit(main())
"""


def test_only_the_configuration_touches_the_environment() -> None:
    """Variables have one place where they are read, and where they are set."""
    touching = []
    for folder in ("mlxcel", "backends"):
        for file in (ROOT / folder).rglob("*.py"):
            names = {
                node.attr if isinstance(node, ast.Attribute) else node.name
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                if isinstance(node, ast.Attribute | ast.alias)
            }
            if names & {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}:
                touching.append(str(file.relative_to(ROOT)))
    assert touching == ["mlxcel/config.py"]


# --- after it was imported -----------------------------------------------------------------------------------------

LATE = """
import logging, sys
import jax
from mlxcel.core.backend import BackendSettings
from mlxcel.errors import DeviceError
from mlxcel_jax_cuda.compile_cache import folder_in_use
from mlxcel_jax_cuda.device import choose_device
from mlxcel_jax_cuda.runtime import prepare
from pathlib import Path

prepare(BackendSettings("auto", 0.5, None))
print(jax.config.jax_platforms, folder_in_use())
prepare(BackendSettings("cpu", 0.5, Path("kept")))
print(jax.config.jax_platforms, folder_in_use().parts[-2])
print(choose_device("cpu").platform)
prepare(BackendSettings("cpu", 0.5, Path("other")))
print(folder_in_use().parts[-2])
try:
    prepare(BackendSettings("cuda", 0.5, None))
except DeviceError as error:
    print(error.message)
"""


def test_h_q1_what_jax_still_takes_is_set_and_what_it_does_not_take_is_refused(run: Run) -> None:
    """JAX was imported by somebody else: its configuration is set until it starts; then a GPU cannot be added."""
    done = run("-c", LATE)
    assert done.stdout.splitlines() == [
        "cuda,cpu None",
        "cpu kept",
        "cpu",
        "kept",
        "JAX runs in this process already, on cpu alone: cuda cannot be added",
    ], done.stderr


@pytest.mark.parametrize(
    ("share", "limit", "said"),
    [
        (0.5, 8 * GIB, []),
        (0.5, 12 * GIB, []),
        (0.75, 8 * GIB, [f"with {8 * GIB} bytes of the device as its limit: --gpu-memory-utilization 0.75"]),
        (None, 8 * GIB, []),
    ],
)
def test_h_q1_a_share_that_comes_too_late_is_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    share: float | None,
    limit: int,
    said: list[str],
) -> None:
    """JAX runs on a GPU already. A second model of the same share says nothing; no variable is set any more."""
    gpu = Gpu(counters={"bytes_in_use": 0, "bytes_limit": limit})
    monkeypatch.setattr(runtime, "has_started", lambda: True)
    monkeypatch.setattr(runtime, "set_variables", lambda *values, **more: pytest.fail("too late"))
    monkeypatch.setattr("jax.extend.backend.backends", lambda: {"cuda": None, "cpu": None})
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu(), gpu])
    monkeypatch.setattr(driver, "device_memory", lambda number: DeviceMemory(16 * GIB, 16 * GIB))
    with caplog.at_level(logging.WARNING, "mlxcel"):
        runtime.prepare(BackendSettings("cuda:1", share, None))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(said)
    assert all(words in line for words, line in zip(said, told, strict=True))


# --- compiled programs ---------------------------------------------------------------------------------------------

COMPILE = """
import logging, sys
from pathlib import Path
from mlxcel.core.backend import BackendSettings
from mlxcel_jax_cuda.runtime import prepare
logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
prepare(BackendSettings("cpu", None, Path("kept")))
import jax
from jax import monitoring
from mlxcel_jax_cuda.compile_cache import folder_in_use, mended
counts = {}
def count(event, **more):
    counts[event.split("/")[-1]] = counts.get(event.split("/")[-1], 0) + 1
monitoring.register_event_listener(count)
for cut in sys.argv[1:]:
    jax.clear_caches()
    counts.clear()
    for entry in folder_in_use().glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:int(cut)])
    with mended():
        assert float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((8, 8)))) == 512
    print(counts.get("cache_hits", 0) > 0, counts.get("cache_misses", 0) > 0)
"""
WHOLE = 1 << 30


def test_h_q5_a_second_start_compiles_nothing_and_damage_is_mended(run: Run, tmp_path: Path) -> None:
    """Programs of a fraction of a second are kept too. What cannot be read is compiled, told once, and gone: the start
    behind it is a cold one, and the next warm again."""
    assert run("-c", COMPILE, WHOLE).stdout == "False True\n"
    (folder,) = (tmp_path / "kept").iterdir()
    assert folder.name == f"jax-{jax.__version__}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    done = run("-W", "error", "-c", COMPILE, WHOLE, 0, WHOLE, WHOLE, 100, WHOLE, WHOLE)
    told = [line for line in done.stdout.splitlines() if line.endswith("are damaged: the folder is emptied")]
    assert [line.split()[0] for line in done.stdout.splitlines() if line not in told] == [
        "True", "False", "False", "True", "False", "False", "True",
    ], done.stderr  # fmt: skip
    assert len(told) == 2
    assert str(folder.name) in told[0]


def test_h_q5_a_folder_that_cannot_be_kept_in_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in its place, another user's folder; JAX's configuration stays as it was."""
    (tmp_path / "file").write_text("")
    before = compile_cache.folder_in_use()
    monkeypatch.setattr(compile_cache, "folder_in_use", lambda: None)
    with caplog.at_level(logging.WARNING, "mlxcel"):
        compile_cache.use_cache(tmp_path / "file")
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        compile_cache.use_cache(tmp_path / "folder")
    monkeypatch.undo()
    assert compile_cache.folder_in_use() == before
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"compiled programs are not kept: {tmp_path}/file/jax-")
    assert second.startswith(f"compiled programs are not kept: {tmp_path}/folder/jax-")


def test_rights_of_a_folder_are_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    compile_cache.make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_other_warnings_pass_through_what_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    with pytest.warns(DeprecationWarning, match="old"), compile_cache.mended():
        warnings.warn("old", DeprecationWarning, stacklevel=1)


# --- devices -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Gpu:
    """A jax.Device as far as it is asked."""

    local_hardware_id: int = 0
    counters: dict[str, int] = attrs.field(factory=dict)
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"
    core_count: int = 132

    def memory_stats(self) -> dict[str, int]:
        return self.counters


@pytest.mark.parametrize(("asked", "place"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch, asked: str, place: int) -> None:
    there = [Gpu(0), Gpu(1)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: there if backend == "cuda" else [])
    assert choose_device(asked) is there[place]
    assert device_facts(choose_device(asked)) == DeviceFacts("cuda", "NVIDIA H200", "9.0", 132)


def test_the_cpu_is_a_device_without_memory_of_its_own() -> None:
    device = choose_device("cpu")
    assert device_facts(device) == DeviceFacts("cpu", "XLA:CPU", "", 0)
    assert device_memory(device) is None


def test_h_q7_a_device_that_is_not_there_is_an_error_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu(0), Gpu(1)])
    with pytest.raises(DeviceError, match="there is no device cuda:2") as caught:
        choose_device("cuda:2")
    assert caught.value.hint == "there are cuda:0 (NVIDIA H200), cuda:1 (NVIDIA H200)"

    def none(backend: str) -> None:
        raise RuntimeError(f"Unknown backend {backend}.\nMore lines")

    monkeypatch.setattr(jax, "local_devices", none)
    with pytest.raises(DeviceError) as caught:
        choose_device("cuda:1")
    assert caught.value.message == "JAX has no device cuda:1 here: Unknown backend cuda."


@pytest.mark.parametrize(
    ("asked", "platform", "dtype"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_the_type_of_the_computation(asked: str, platform: str, dtype: str) -> None:
    assert compute_dtype(asked, platform) == dtype


def test_a_type_that_it_does_not_compute_in_is_refused() -> None:
    with pytest.raises(UsageError, match="jax-cuda computes in float32 or bfloat16, not in float16"):
        compute_dtype("float16", "cuda")


@pytest.mark.parametrize(
    ("counters", "found", "memory"),
    [
        # nothing taken yet: as far as JAX's limit goes, or what others leave
        ({"bytes_in_use": 0, "bytes_limit": 90, "pool_bytes": 0}, (100, 98), (100, 90)),
        ({"bytes_in_use": 0, "bytes_limit": 90, "pool_bytes": 0}, (100, 30), (100, 30)),
        # a pool that is this process's own is not free to the driver, and free to JAX but for what is in use
        ({"bytes_in_use": 25, "bytes_limit": 90, "pool_bytes": 90}, (100, 8), (100, 65)),
        ({"bytes_in_use": 25, "bytes_limit": 90}, (100, 40), (100, 40)),
        # the driver does not say
        ({"bytes_in_use": 25, "bytes_limit": 90}, None, (90, 65)),
        ({}, (100, 98), None),
    ],
)
def test_v18_memory_of_a_device_is_what_this_process_may_still_take(
    monkeypatch: pytest.MonkeyPatch,
    counters: dict[str, int],
    found: tuple[int, int] | None,
    memory: tuple[int, int] | None,
) -> None:
    """Spec V18."""
    asked: list[int] = []

    def of_driver(ordinal: int) -> DeviceMemory | None:
        asked.append(ordinal)
        return None if found is None else DeviceMemory(*found)

    monkeypatch.setattr(driver, "device_memory", of_driver)
    device: Any = Gpu(3, counters)
    assert device_memory(device) == (None if memory is None else DeviceMemory(*memory))
    assert asked == ([3] if counters else [])


def test_what_the_device_has_no_memory_for_is_named() -> None:
    device: Any = Gpu(0, {"bytes_in_use": 60, "bytes_limit": 90})
    with pytest.raises(CapacityError) as caught, enough_memory(device, "the KV"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 40 bytes.")
    said = "NVIDIA H200 has no memory left for the KV: 60 bytes are in use, 90 are the limit of this process"
    assert caught.value.message == said
    assert "--kv-cache-budget" in str(caught.value.hint)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), enough_memory(device, "the KV"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_memory_that_a_cpu_has_not_is_named_too() -> None:
    """Of 256 TiB, which no machine has."""
    with pytest.raises(CapacityError, match="no memory left for the KV"), enough_memory(choose_device("cpu"), "the KV"):
        jax.numpy.zeros((1 << 46,), jax.numpy.float32)


class Libcuda:
    """NVIDIA's library with one device of 16 GiB, of which 5 are free. `fails` names a call that does not succeed."""

    def __init__(self, fails: str | None) -> None:
        self._fails, self.held, self.current = fails, 0, 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name == self._fails:
                return 999
            self.held += {"cuDevicePrimaryCtxRetain": 1, "cuDevicePrimaryCtxRelease_v2": -1}.get(name, 0)
            self.current += {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
            if name == "cuMemGetInfo_v2":
                assert self.current == 1
                arguments[0]._obj.value, arguments[1]._obj.value = 5 * GIB, 16 * GIB
            return 0

        return call


@pytest.mark.parametrize(
    "fails", [None, "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"]
)
def test_the_driver_is_asked_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch, fails: str | None) -> None:
    library = Libcuda(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert driver.device_memory(0) == (DeviceMemory(16 * GIB, 5 * GIB) if fails is None else None)
    assert (library.held, library.current) == (0, 0)


def test_a_machine_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert (driver.has_driver(), driver.cuda_version(), driver.device_memory(0)) == (False, None, None)
