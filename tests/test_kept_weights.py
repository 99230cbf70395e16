"""Weights that engines of one process use one behind the other (mlxcel/kept_weights.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.backend import DeviceMemory, SharesWeights
from mlxcel.core.bind_params import Caps
from mlxcel.core.params import SamplingParams
from mlxcel.core.source import NoProgress
from mlxcel.direct import generate
from mlxcel.errors import CapacityError
from mlxcel.kept_weights import KeptWeights
from mlxcel.load import LoadedModel, load_model
from mlxcel.memory_plan import Memory
from mlxcel.plugins.manager import PluginManager
from mlxcel.prepare import Prompt, sequence_spec
from mlxcel_reference_numpy.backend import NumpyBackend

TOTAL = 8 << 30


class Phases(NoProgress):
    """Notes what is told of."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self.begun.append(phase)


@pytest.fixture
def kept() -> Iterator[KeptWeights]:
    weights = KeptWeights()
    yield weights
    weights.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def loaded(path: Path, kept: KeptWeights | None, progress: NoProgress, **options: Any) -> LoadedModel:
    manager = PluginManager.load(only=(), trace=None)
    values = {"model": str(path), "device": "cpu", **options}
    return load_model(EngineConfig.resolve(values, environ={"HOME": "/nowhere"}), manager, progress, kept=kept)


def tokens(model: LoadedModel) -> tuple[tuple[int, ...], list[Any]]:
    """What it generates, with the best candidates of each step."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=4)
    spec = sequence_spec(model, Prompt((1, 5, 9)), params, request_id="x", caps=Caps(max_n=1))
    result = generate(model.engine, spec, planner=model.planner)
    return result.token_ids, [each.top for each in result.logprobs]


def test_the_second_engine_reads_nothing_and_gives_the_same_bits(path: Path, kept: KeptWeights, backend: str) -> None:
    """Each behind the other, of another storage, the first of them closed: its weights are still there."""
    progress = Phases()
    with loaded(path, None, NoProgress(), backend=backend) as model:
        alone = tokens(model)
    with loaded(path, kept, progress, backend=backend) as model:
        first, held = tokens(model), model.facts.weight_bytes
    assert progress.begun == ["load"]
    with loaded(path, kept, progress, backend=backend, kv_storage="paged") as model:
        assert tokens(model) == first == alone
        assert model.facts.weight_bytes == held
    assert progress.begun == ["load"]
    kept.close()
    loaded(path, kept, progress, backend=backend).close()
    assert progress.begun == ["load", "load"]


def test_the_memory_of_kept_weights_is_counted_once(
    path: Path, kept: KeptWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device that says what is free now: the KV behind them is as large as it was for the first engine."""
    taken = 0
    monkeypatch.setattr(NumpyBackend, "memory", lambda backend: DeviceMemory(TOTAL, TOTAL // 2 - taken))
    asked = {"backend": "reference-numpy", "max_num_seqs": 4}
    with loaded(path, kept, NoProgress(), **asked) as model:
        taken, before = model.facts.weight_bytes, model.engine.kv_stats
    with loaded(path, kept, NoProgress(), **asked) as model:
        assert model.engine.kv_stats == before
    memory = Memory.of_device(TOTAL, TOTAL // 2 - taken)
    there = kept.beside(memory)
    assert there is not None
    assert (there.free, there.total) == (TOTAL // 2, TOTAL)
    assert kept.beside(None) is None
    kept.close()
    assert kept.beside(memory) is memory


def test_weights_that_could_not_be_read_are_not_kept(path: Path, kept: KeptWeights) -> None:
    backend = NumpyBackend()

    def read() -> None:
        raise CapacityError("no room")

    with pytest.raises(CapacityError):
        kept.load(backend, read, NumpyBackend)
    with pytest.raises(RuntimeError, match=r"load\(\) comes before"):
        NumpyBackend().take_weights(backend)
    with loaded(path, kept, NoProgress(), backend="reference-numpy") as model:
        assert np.all(np.array(tokens(model)[0]) >= 0)


def test_a_backend_that_cannot_share_reads_them_each_time(kept: KeptWeights) -> None:
    class Reader:
        """Not even by chance."""

    assert not isinstance(Reader(), SharesWeights)
    read: list[int] = []
    for _ in range(2):
        kept.load(Reader(), lambda: read.append(1), Reader)  # type: ignore[arg-type]
    assert len(read) == 2
