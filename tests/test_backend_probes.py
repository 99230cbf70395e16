"""What backends say of a machine without importing anything heavy, which one is taken, and what is settled around its
import and its start (hand cases H-Q1, H-Q5, H-Q7)."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import pytest
from plugin_doubles import HEADER, Installer, load
from tiny_checkpoint import write_tiny_llama

import mlxcel_jax_cuda.driver
import mlxcel_jax_cuda.probe
import mlxcel_reference_numpy.backend
import mlxcel_reference_numpy.probe
from mlxcel.choose_backend import choose_backend
from mlxcel.config import EngineConfig
from mlxcel.core.backend import DeviceMemory, Probe
from mlxcel.core.plan import StepPlan, StepResult
from mlxcel.core.source import NoProgress, Progress
from mlxcel.errors import CapacityError, CheckpointError, DeviceError
from mlxcel.load import load_model
from mlxcel_reference_numpy.backend import NumpyBackend

CUDA = "on NVIDIA GPUs: pip install 'mlxcel[cuda13]', or 'mlxcel[cuda12]' for an older driver"
CPU = "pip install 'mlxcel[jax]'"
DRIVER = "an NVIDIA driver (libcuda.so.1)"
GPU = "an NVIDIA GPU"
PLUGIN = "the CUDA plugin of jax"
NAMES = ("NVIDIA H200", "NVIDIA L4")
JAX = ("jax", "flax")

Machine = Callable[..., None]


class Driver:
    """libcuda as far as it is asked without a device."""

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = 12090
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Makes this one a machine with these packages; "driver", "gpus" (that the driver lists) and "node" (a device that
    it does not list) are among the names."""

    def become(*there: str) -> None:
        def open_library(name: str) -> Driver:
            assert name == "libcuda.so.1"
            if "driver" not in there:
                raise OSError(f"{name}: cannot open shared object file")
            return Driver()

        monkeypatch.setattr(ctypes, "CDLL", open_library)
        monkeypatch.setattr(mlxcel_jax_cuda.probe, "find_spec", lambda name: name if name in there else None)
        monkeypatch.setattr(mlxcel_jax_cuda.driver, "_LISTED", tmp_path / "listed")
        monkeypatch.setattr(mlxcel_jax_cuda.driver, "_NODES", tmp_path / "dev")
        for number, model in enumerate(NAMES if "gpus" in there else ()):
            (tmp_path / f"listed/0000:0{number}").mkdir(parents=True)
            (tmp_path / f"listed/0000:0{number}/information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
        if "node" in there:
            (tmp_path / "dev").mkdir()
            (tmp_path / "dev/nvidia3").touch()

    return become


def config(**given: Any) -> EngineConfig:
    return EngineConfig.resolve(given, environ={"MLXCEL_CACHE_DIR": "/nowhere"})


# --- probes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
@pytest.mark.parametrize(
    ("there", "lacking"),
    [
        ((), f"jax, flax, {DRIVER} and {GPU}"),
        (JAX, f"{PLUGIN}, {DRIVER} and {GPU}"),
        (("jax",), f"flax, {PLUGIN}, {DRIVER} and {GPU}"),
        ((*JAX, "jax_cuda12_plugin"), f"{DRIVER} and {GPU}"),
        ((*JAX, "jax_cuda12_plugin", "driver"), GPU),
        ((*JAX, "jax_cuda12_plugin", "node"), DRIVER),
        ((*JAX, "driver", "gpus"), PLUGIN),
        (("driver", "node"), "jax and flax"),
    ],
)
def test_h_q7_jax_cuda_says_what_is_missing_for_a_gpu(
    machine: Machine, device: str, there: tuple[str, ...], lacking: str
) -> None:
    """All of it at once, what installs the packages beside it; a GPU that is there is named."""
    machine(*there)
    probe = mlxcel_jax_cuda.probe.probe(device)
    assert not probe.available
    assert probe.reason == f"it needs {lacking}"
    assert probe.hint == (CUDA if "jax" in lacking or "flax" in lacking else None)
    assert bool(probe.devices) == (GPU not in lacking)


@pytest.mark.parametrize("plugin", ["jax_cuda12_plugin", "jax_cuda13_plugin"])
@pytest.mark.parametrize(("seen", "names"), [("gpus", NAMES), ("node", (GPU,))])
def test_jax_cuda_is_available_on_a_gpu(machine: Machine, plugin: str, seen: str, names: tuple[str, ...]) -> None:
    machine(*JAX, plugin, "driver", seen)
    probe = mlxcel_jax_cuda.probe.probe("auto")
    said = f"JAX {version('jax')} with {plugin} on {names[0]}, whose driver serves CUDA 12.9"
    assert (probe.available, probe.reason, probe.devices, probe.by_name_only) == (True, said, names, False)


@pytest.mark.parametrize(
    ("there", "lacking"),
    [((), "jax and flax"), (("jax", "driver", "gpus"), "flax"), (("flax",), "jax")],
)
def test_on_the_cpu_jax_and_flax_are_all_it_needs(machine: Machine, there: tuple[str, ...], lacking: str) -> None:
    machine(*there)
    assert mlxcel_jax_cuda.probe.probe("cpu") == Probe(available=False, reason=f"it needs {lacking}", hint=CPU)


@pytest.mark.parametrize(("more", "idle"), [((), ""), (("driver", "gpus"), "NVIDIA H200, NVIDIA L4"), (("node",), GPU)])
def test_h_q7_jax_on_the_cpu_says_so_and_which_gpu_is_idle(machine: Machine, more: tuple[str, ...], idle: str) -> None:
    machine(*JAX, *more)
    probe = mlxcel_jax_cuda.probe.probe("cpu")
    assert (probe.available, probe.by_name_only, probe.devices) == (True, True, ("cpu",))
    assert probe.reason == f"JAX {version('jax')} on XLA:CPU" + (f"; {idle} is not used" if idle else "")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_reference_numpy_is_always_there(device: str) -> None:
    probe = mlxcel_reference_numpy.probe.probe(device)
    assert probe.available
    assert probe.reason == f"NumPy {version('numpy')}"
    assert probe.devices == ("cpu",)


@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_reference_numpy_is_on_no_gpu(device: str) -> None:
    probe = mlxcel_reference_numpy.probe.probe(device)
    assert (probe.available, probe.reason) == (False, f"it runs on the CPU, not on {device}")


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_choice_is_reference_numpy(
    machine: Machine, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """JAX on the CPU is for whoever names it. Why it is not another one is a line for who asks for more."""
    machine(*JAX)
    with caplog.at_level(logging.INFO, "mlxcel"):
        chosen = choose_backend(config(device=device), load(only=()))
    assert (
        chosen.line
        == f"backend: reference-numpy (the best one available), on cpu: {chosen.backend.caps.device}, float32"
    )
    why = "only where it is named" if device == "cpu" else f"it needs {PLUGIN}, {DRIVER} and {GPU}"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", f"not jax-cuda: {why}")]


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_h_q7_a_named_backend_without_its_gpu_is_an_error(machine: Machine, device: str) -> None:
    """Exit 3, all that is missing, and the two ways on: nothing falls back."""
    machine(*JAX)
    with pytest.raises(DeviceError) as caught:
        choose_backend(config(backend="jax-cuda", device=device), load(only=()))
    assert caught.value.exit_code == 3
    assert caught.value.message == f"the backend jax-cuda cannot run here: it needs {PLUGIN}, {DRIVER} and {GPU}"
    assert str(caught.value.hint).startswith(f"{CUDA}; or `--device cpu` runs jax-cuda on the CPU")


def test_h_q7_without_jax_the_hint_is_another_backend(machine: Machine) -> None:
    machine("driver", "gpus")
    with pytest.raises(DeviceError) as caught:
        choose_backend(config(backend="jax-cuda"), load(only=()))
    assert "leave --backend out" in str(caught.value.hint)


def test_h_q7_a_device_that_no_backend_has(machine: Machine) -> None:
    machine(*JAX)
    with pytest.raises(DeviceError, match="no backend can run on the device cuda: jax-cuda: it needs") as caught:
        choose_backend(config(device="cuda"), load(only=()))
    assert "reference-numpy: it runs on the CPU, not on cuda" in caught.value.message
    assert "mlxcel[cuda13]" in str(caught.value.hint)


def test_h_q7_a_gpu_that_the_cpu_build_cannot_use_is_a_warning(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine(*JAX, "driver", "gpus")
    with caplog.at_level(logging.WARNING, "mlxcel"):
        assert choose_backend(config(), load(only=())).name == "reference-numpy"
    assert [record.getMessage() for record in caplog.records] == [
        f"jax-cuda cannot use NVIDIA H200, NVIDIA L4: it needs {PLUGIN} ({CUDA})"
    ]


# --- around its import and its start -------------------------------------------------------------------------------

PREPARED = (
    HEADER
    + """
import sys
from pathlib import Path
from mlxcel.core.backend import Probe

def probe(device):
    return Probe(True, f"asked for {device}", ("d",))

def prepare(settings):
    print("prepared", settings, "early_backend" in sys.modules)

@hookimpl
def mlxcel_backends():
    return [BackendSpec("early", "", "early_backend:Backend", priority=999, probe_target=f"{__name__}:probe",
                        prepare_target=f"{__name__}:prepare")]
"""
)
BACKEND = """
from mlxcel_reference_numpy.backend import NumpyBackend

class Backend(NumpyBackend):
    def __init__(self, **options):
        print("made", options)
        super().__init__(**{**options, "device": "cpu"})
"""


def test_h_q1_a_backend_is_prepared_before_it_is_imported(
    third_party: Installer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With device, share of memory and a folder; then it is called with the three keywords that all backends get."""
    third_party.install("early", PREPARED)
    (third_party.folder / "early_backend.py").write_text(BACKEND)
    asked = {"device": "cuda:1", "gpu_memory_utilization": 0.25, "deterministic": True}
    own = EngineConfig.resolve(asked, environ={"MLXCEL_CACHE_DIR": str(tmp_path)})
    assert choose_backend(own, load()).name == "early"
    prepared, made = capsys.readouterr().out.splitlines()
    folder = tmp_path / "backends" / "early"
    assert prepared == f"prepared BackendSettings(device='cuda:1', memory_share=0.25, cache_folder={folder!r}) False"
    assert made == "made {'device': 'cuda:1', 'dtype': 'auto', 'deterministic': True}"


def test_a_user_without_a_home_has_no_cache_and_still_a_model_store() -> None:
    own = EngineConfig.resolve({}, environ={"MLXCEL_MODELS_DIR": "/models", "XDG_CACHE_HOME": "/cache"})
    assert (own.store_root, own.cache_root) == (Path("/models"), Path("/cache/mlxcel"))
    assert EngineConfig.resolve({}, environ={"MLXCEL_CACHE_DIR": "/own"}).cache_root == Path("/own")


class Told(NoProgress):
    """Notes phases."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int | None, str]] = []

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self.phases.append((phase, total, unit))


def test_h_q5_a_backend_that_compiles_does_so_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the weights and behind `start`, with its own phase of progress; once."""
    model, told = write_tiny_llama(tmp_path / "m"), Told()
    seen: list[tuple[int, bool]] = []

    class Compiling(NumpyBackend):
        def warm_up(self, progress: Progress) -> None:
            seen.append((self._started().layout.slots, self.weight_bytes > 0))
            progress.start("compile", 3, "programs")
            progress.finish()

        def submit(self, plan: StepPlan) -> StepResult:
            pytest.fail("a step came first")

    monkeypatch.setattr(mlxcel_reference_numpy.backend, "NumpyBackend", Compiling)
    own = config(model=str(model), backend="reference-numpy", max_num_seqs=2)
    with load_model(own, load(only=()), told, scheduled=True):
        assert seen == [(2, True)]
    assert [phase[0] for phase in told.phases] == ["load", "compile"]
    assert told.phases[1] == ("compile", 3, "programs")
    with load_model(attrs.evolve(own, no_warmup=True), load(only=()), told, scheduled=True):
        assert len(seen) == 1
    with load_model(own, load(only=()), told, slots=1):  # one row compiles what it needs, when it does
        assert len(seen) == 1


def test_a_failed_warm_up_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Broken(NumpyBackend):
        def warm_up(self, progress: Progress) -> None:
            raise DeviceError("the compiler is gone")

        def close(self) -> None:
            closed.append(1)

    monkeypatch.setattr(mlxcel_reference_numpy.backend, "NumpyBackend", Broken)
    own = config(model=str(write_tiny_llama(tmp_path / "m")), backend="reference-numpy")
    with pytest.raises(DeviceError, match="the compiler is gone"):
        load_model(own, load(only=()), NoProgress(), scheduled=True)
    assert closed


def test_a_refused_model_leaves_no_backend_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(NumpyBackend, "close", lambda backend: closed.append(1))
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    (tmp_path / "model.safetensors").write_bytes((write_tiny_llama(tmp_path / "m") / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="nobody"):
        load_model(config(model=str(tmp_path), backend="reference-numpy"), load(only=()), NoProgress())
    assert closed == [1]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_v18_a_device_is_planned_for_by_its_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Spec V18, V20: asked before the weights are loaded, so that they are not counted twice. Beside the least margin
    there is, the share of 4 MiB."""
    margin, left = 512 << 20, int(share * (4 << 20))
    total = int((margin + left) / share)

    def memory(backend: NumpyBackend) -> DeviceMemory:
        assert backend._model is None
        return DeviceMemory(total, total)

    monkeypatch.setattr(NumpyBackend, "memory", memory)
    asked = {"model": str(write_tiny_llama(tmp_path / "m")), "backend": "reference-numpy", "prefill_chunk": 16}
    with load_model(config(**asked, gpu_memory_utilization=share), load(only=()), NoProgress()) as model:
        at_most = left - model.engine._backend.weight_bytes
        positions = model.engine.kv_stats.total * model.engine.kv_stats.page_size
        assert 0 < positions * 512 < at_most
        assert model.facts.context == (2048 if share == 1 else positions)
    with pytest.raises(CapacityError, match=rf"0\.1 of the device's {total}"):
        load_model(config(**asked, gpu_memory_utilization=0.1), load(only=()), NoProgress())
