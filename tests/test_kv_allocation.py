"""What a start takes of a device: weights one after another, and KV, less of it where the device gives less (V18)."""

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
from mlxcel_jax_cuda import storage, weights
from mlxcel_jax_cuda.backend import JaxBackend
from mlxcel_jax_cuda.fused_decode import fused_block
from mlxcel_jax_cuda.numerics import Numerics
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
            assert 0.9 * before * 31 / 32 - page < after <= 0.9 * before  # in whole pages, of few binary digits
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


class Late:
    """An array that is ready when somebody has waited for it."""

    def __init__(self) -> None:
        self.waited = False

    def block_until_ready(self) -> None:
        self.waited = True

    def __getitem__(self, key: object) -> Late:
        return self


def small_llama() -> tuple[Any, Any]:
    """The family, and a checkpoint of one layer."""
    llama: Any = MODELS["llama"]
    kind, overrides = llama
    return kind(), random_checkpoint(kind(), {**SMALL, "num_hidden_layers": 1, **overrides})


def test_weights_pass_through_the_device_one_group_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """V18: what the margin is for is the largest of them in float32, and not as many as a host can read meanwhile."""
    family, checkpoint = small_llama()
    made: list[Late] = []

    def placed(*given: object) -> Late:
        assert all(array.waited for array in made)
        made.append(Late())
        return made[-1]

    monkeypatch.setattr(weights, "_placed", placed)
    schema, numerics = family.schema(family.parse_config(checkpoint)), Numerics("cpu", "float32", "R2")
    weights.load_weights(schema, checkpoint, numerics, jax.devices("cpu")[0], NoProgress(), {})
    assert len(made) > 6


def test_weights_of_a_standard_block_do_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    family, checkpoint = small_llama()
    config, numerics = family.parse_config(checkpoint), Numerics("cpu", "float32", "R0", formulas=True)
    block = fused_block(family, config, numerics, config.context)
    assert block is not None
    seen: list[str] = []

    def noted(name: str, call: Any) -> Any:
        def noting(*given: Any) -> Any:
            seen.append(name)
            return call(*given)

        return noting

    monkeypatch.setattr(jax, "block_until_ready", noted("wait", jax.block_until_ready))
    monkeypatch.setattr(jax, "device_put", noted("place", jax.device_put))
    weights.load_block(family.schema(config), block, checkpoint, numerics, jax.devices("cpu")[0], NoProgress())
    first, last = seen.index("place"), len(seen) - 1 - seen[::-1].index("wait")
    assert first < last
    assert "place,place" not in ",".join(seen[:last])


def test_jax_holds_nothing_of_a_kv_that_it_did_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec V18: `start` may be called again, and the arrays that were made before the refusal are gone by then."""
    family, checkpoint = small_llama()
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
