"""A device that gives less than was planned: less is asked for, and said (spec V18)."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_standard_block import MODELS, SMALL
from tiny_checkpoint import write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.backend import DeviceMemory
from mlxcel.core.kv import KVLayout
from mlxcel.core.source import NoProgress
from mlxcel.errors import CapacityError, UsageError
from mlxcel.load import LoadedModel, load_model
from mlxcel.plugins.manager import PluginManager
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda import storage
from mlxcel_jax_cuda.backend import JaxBackend
from mlxcel_reference_numpy.backend import NumpyBackend

POSITION = 512  # bytes of a position of the tiny model
TOTAL = (512 << 20) + (8 << 20)  # the least margin there is, and so much for weights, workspace and KV


class Device:
    """Gives pages up to `most` bytes; whoever asks for more holds half of them until it is forgotten."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[int] = []
        self.held: list[weakref.ref[np.ndarray]] = []

    def give(self, layout: KVLayout) -> None:
        assert all(held() is None for held in self.held), "what was made before a refusal is still there"
        self.asked.append(layout.pages * layout.page_size * POSITION)
        made = np.zeros(1000)
        self.held.append(weakref.ref(made))
        if self.asked[-1] > self.most:
            raise CapacityError(f"no memory left for the KV of {layout.pages} pages") from RuntimeError("exhausted")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Of every NumPy backend."""
    there, start = Device(0), NumpyBackend.start

    def start_there(backend: NumpyBackend, layout: KVLayout, sampler: Any) -> None:
        there.give(layout)
        start(backend, layout, sampler)

    monkeypatch.setattr(NumpyBackend, "memory", lambda backend: DeviceMemory(TOTAL, TOTAL))
    monkeypatch.setattr(NumpyBackend, "start", start_there)
    return there


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "m")


def loaded(path: Path, **options: Any) -> LoadedModel:
    asked = {"model": str(path), "backend": "reference-numpy", "gpu_memory_utilization": 1.0, "prefill_chunk": 16}
    config = EngineConfig.resolve({**asked, **options}, environ={})
    return load_model(config, PluginManager.load(only=(), trace=None), NoProgress(), scheduled=True)


@pytest.mark.parametrize("refusals", [0, 1, 3])
def test_v18_a_tenth_less_is_asked_for(
    path: Path, device: Device, caplog: pytest.LogCaptureFixture, refusals: int
) -> None:
    device.most = TOTAL
    with loaded(path):
        (planned,) = device.asked
    device.most, device.asked = int(planned * (1.01 if refusals == 0 else 0.91 * 0.9 ** (refusals - 1))), []
    caplog.clear()
    with loaded(path) as model:
        first, *less = device.asked
        assert (first, len(less)) == (planned, refusals)
        for before, after in zip(device.asked, less, strict=False):
            page = POSITION * model.engine.kv_stats.page_size
            assert 0.9 * before - page < after <= 0.9 * before
        assert model.engine.kv_stats.total * model.engine.kv_stats.page_size * POSITION == device.asked[-1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = [f"{before} bytes were asked for; now {int(0.9 * before)} are" for before in device.asked[:-1]]
    assert len(warnings) == refusals
    assert all(words in line for words, line in zip(told, warnings, strict=True))


def test_v18_three_times_at_most(path: Path, device: Device) -> None:
    with pytest.raises(CapacityError, match="no memory left for the KV"):
        loaded(path)
    assert len(device.asked) == 4


def test_v18_a_budget_that_was_asked_for_is_not_made_smaller(path: Path, device: Device) -> None:
    with pytest.raises(CapacityError, match="no memory left for the KV"):
        loaded(path, kv_cache_budget=2 << 20)
    assert len(device.asked) == 1


def test_v20_a_context_that_was_asked_for_is_not_made_shorter(path: Path, device: Device) -> None:
    """Dense rows have each so many positions, and a tenth less holds fewer."""
    with pytest.raises(UsageError, match=r"--ctx-size 2048 does not fit.*were to be had"):
        loaded(path, max_model_len=2048, kv_storage="dense", max_num_seqs=2)
    assert len(device.asked) == 1


def test_jax_holds_nothing_of_a_kv_that_it_did_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec V18: `start` may be called again, and the arrays that were made before the refusal are gone by then."""
    llama: Any = MODELS["llama"]
    kind, overrides = llama
    family = kind()
    checkpoint = random_checkpoint(family, {**SMALL, "num_hidden_layers": 1, **overrides})
    backend, config = JaxBackend(device="cpu"), family.parse_config(checkpoint)
    backend.load(family, config, checkpoint, NoProgress())
    layout = KVLayout(family.kv_spec(config), pages=4, page_size=64, paged=True, slots=2, context=128, chunk=64)
    make = storage.make_storage
    made: list[weakref.ref[jax.Array]] = []

    def too_much(*given: Any) -> Any:
        arrays = make(*given)
        made.extend(map(weakref.ref, arrays))
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    sampler = ChainSampler(vocab=config.vocab_size)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "make_storage", too_much)
        with pytest.raises(CapacityError, match="no memory left for the KV of 4 pages") as caught:
            backend.start(layout, sampler)
    assert made
    del caught
    gc.collect()
    assert all(array() is None for array in made)
    backend.start(layout, sampler)
    backend.close()
