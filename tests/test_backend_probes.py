"""What the two backends say about a machine, without importing anything heavy (hand case H-Q7)."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path

import pytest

import mlxcel_jax_cuda.probe
import mlxcel_reference_numpy.probe
from mlxcel.errors import DeviceError

NO_ENGINE = "this version of mlxcel has no engine for it yet"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A machine with the packages of the parameter, "driver" among them for the driver and one GPU."""
    there = request.param

    def open_library(name: str) -> None:
        assert name == "libcuda.so.1"
        if "driver" not in there:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    monkeypatch.setattr(mlxcel_jax_cuda.probe, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(mlxcel_jax_cuda.probe, "_GPUS", tmp_path)
    if "driver" in there:
        for number, model in enumerate(("NVIDIA H200", "NVIDIA L4")):
            (tmp_path / f"0000:0{number}").mkdir()
            (tmp_path / f"0000:0{number}" / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")


@pytest.mark.parametrize(
    ("machine", "lacking"),
    [
        ((), ["jax (INSTALL)", "an NVIDIA driver (libcuda.so.1)"]),
        (("jax",), ["the CUDA plugin of jax (INSTALL)", "an NVIDIA driver (libcuda.so.1)"]),
        (("jax", "jax_cuda12_plugin"), ["an NVIDIA driver (libcuda.so.1)"]),
        (("jax", "driver"), ["the CUDA plugin of jax (INSTALL)"]),
        (("driver",), ["jax (INSTALL)"]),
        (("jax", "jax_cuda12_plugin", "driver"), []),
        (("jax", "jax_cuda13_plugin", "driver"), []),
    ],
    indirect=["machine"],
)
@pytest.mark.usefixtures("machine")
def test_h_q7_jax_cuda_says_what_is_missing_and_never_falls_back(lacking: list[str]) -> None:
    probe = mlxcel_jax_cuda.probe.probe()
    assert not probe.available
    said = " and ".join(lacking).replace("INSTALL", "pip install 'mlxcel[cuda13]' or 'mlxcel[cuda12]'")
    needs = f"; this machine would need {said}" if lacking else ""
    assert probe.reason == NO_ENGINE + needs
    with pytest.raises(DeviceError) as caught:
        mlxcel_jax_cuda.probe.refuse(device="auto", dtype="auto", deterministic=False)
    assert caught.value.exit_code == 3
    assert probe.reason in caught.value.message
    assert "reference-numpy" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("machine", "names"), [(("driver",), ("NVIDIA H200", "NVIDIA L4")), ((), ())], indirect=["machine"]
)
@pytest.mark.usefixtures("machine")
def test_jax_cuda_names_the_gpus(names: tuple[str, ...]) -> None:
    assert mlxcel_jax_cuda.probe.probe().devices == names


def test_reference_numpy_is_always_there() -> None:
    probe = mlxcel_reference_numpy.probe.probe()
    assert probe.available
    assert probe.reason == f"NumPy {version('numpy')}"
    assert probe.devices == ("cpu",)
