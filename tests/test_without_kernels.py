"""What is said where a GPU runs a model op by op (backends/jax_cuda/without_kernels.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from tiny_checkpoint import write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.load import load_model
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.manager import PluginManager
from mlxcel.testing.random_checkpoint import SHAPES, RandomCheckpoint
from mlxcel_reference_numpy.backend import NumpyBackend

pytest.importorskip("jax")

from mlxcel_jax_cuda.fused_decode import fused_block
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.without_kernels import remark

HOPPER = Numerics("cuda", "bfloat16", "R0", 132)
SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}


def model(numerics: Numerics, **changed: Any) -> Model:
    family = Llama()
    config = family.parse_config(RandomCheckpoint({**SHAPES["llama-3.2-1b"], **changed}, "llama"))
    block = None if numerics.watched else fused_block(family, config, numerics, 256)
    layout: Any = SimpleNamespace(context=256)
    index: Any = None
    return Model(family, config, index, layout, numerics, block)


@pytest.mark.parametrize(
    ("numerics", "changed", "words"),
    [
        (HOPPER, {}, None),
        (HOPPER, SMOLLM2, "9 heads of 3 KV heads do not fill tiles"),
        (HOPPER, {"hidden_act": "gelu"}, "its activation is gelu"),
        (HOPPER, {"mlp_bias": True}, "they know a standard block alone"),
        (attrs.evolve(HOPPER, hopper=0), {}, "they are for Hopper GPUs in bfloat16, and this GPU is another"),
        (Numerics("cuda", "float32", "R0"), {}, "this runs in float32"),
        (attrs.evolve(HOPPER, watched=True), SMOLLM2, None),
        (Numerics("cpu", "float32", "R2"), SMOLLM2, None),
    ],
)
def test_a_model_without_kernels_is_told_with_the_reason(
    numerics: Numerics, changed: dict[str, Any], words: str | None
) -> None:
    said = remark(model(numerics, **changed))
    if words is None:
        assert said is None
    else:
        assert said is not None
        assert said.startswith("no kernels for the layers of this model: ")
        assert words in said
        assert "\n" not in said


@pytest.mark.parametrize("word", ["a word", None])
def test_the_start_tells_what_a_backend_remarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str | None
) -> None:
    monkeypatch.setattr(NumpyBackend, "remark", word, raising=False)
    config = EngineConfig.resolve(
        {"model": str(write_tiny_llama(tmp_path / "m")), "backend": "reference-numpy"}, environ={"HOME": "/nowhere"}
    )
    said: list[str] = []
    load_model(config, PluginManager.load(only=(), trace=None), NoProgress(), say=said.append).close()
    assert said[1:] == ([word] if word else [])


def test_the_backend_imports_flax_only_for_weights_that_are_no_block() -> None:
    """A fifth of what a start imports."""
    script = "import sys, mlxcel_jax_cuda.backend as b; print('flax' in sys.modules, b.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "mlxcel_jax_cuda.backend"]
