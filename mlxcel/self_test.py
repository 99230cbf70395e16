"""Two tokens from the seeded toy model on one backend: whether the whole chain runs here, without any file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from mlxcel.choose_backend import make_backend
from mlxcel.core.backend import BackendCaps, BackendSettings
from mlxcel.core.checkpoint import TensorInfo
from mlxcel.core.engine import Engine
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.result import RequestResult
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.direct import generate
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.text.detokeniser import Detokeniser

if TYPE_CHECKING:
    from mlxcel.core.family import ModelFamily
    from mlxcel.plugins.manager import PluginManager

SEED: Final = 0
TOKENS: Final = 2
CONFIG: Final[Mapping[str, Any]] = {
    "vocab_size": ByteTokenizer.size,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@attrs.frozen(eq=False)
class SeededCheckpoint:
    """A checkpoint that is drawn, not read: normal values of variance 1/(last axis) for each tensor of the schema."""

    config: Mapping[str, Any]
    architecture: str
    tensors: Mapping[str, TensorInfo] = attrs.field(factory=dict)
    path: Path = Path("seeded")
    format: str = "seeded"
    naming: str = "hf"
    assets: Mapping[str, Any] = attrs.field(factory=dict)
    quantisation: str = "F32"

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        info = self.tensors[name]
        place = sorted(self.tensors).index(name)
        values = np.random.default_rng([SEED, place]).standard_normal(info.shape, np.float32)
        values /= np.float32(info.shape[-1] ** 0.5)
        if out is None:
            return values
        out[...] = values
        return out

    def close(self) -> None:
        """Holds no file."""


def seeded_checkpoint(family: ModelFamily, architecture: str, config: Mapping[str, Any]) -> SeededCheckpoint:
    """With the tensors that the family's schema asks for."""
    bare = SeededCheckpoint(config, architecture)
    wanted = family.schema(family.parse_config(bare)).tensor_names("hf")
    tensors = {
        name: TensorInfo(name, place.shape, "F32", 4 * int(np.prod(place.shape))) for name, place in wanted.items()
    }
    return attrs.evolve(bare, tensors=tensors)


def two_tokens(
    manager: PluginManager, backend_name: str, settings: BackendSettings
) -> tuple[RequestResult, BackendCaps]:
    """The reply, and what gave it. Raises what the backend raises; a row's own fault is in the result."""
    family = manager.families().load("tiny")()
    checkpoint = seeded_checkpoint(family, "mlxcel-tiny", CONFIG)
    config = family.parse_config(checkpoint)
    backend = make_backend(manager.backends(), backend_name, settings, dtype="auto", deterministic=False)
    backend.load(family, config, checkpoint, NoProgress())
    tokenizer, kv_spec = ByteTokenizer(), family.kv_spec(config)
    kv = manager.kv_stores().load("dense")(
        kv_spec=kv_spec, slots=1, context=config.context, page_size=backend.caps.page_sizes[0]
    )
    sampler = manager.samplers().load("chain")(vocab=config.vocab_size, tokenizer=tokenizer)
    finish = StandardFinish(stream=lambda row: Detokeniser(tokenizer), steps={})
    bounds = EngineSettings(config.vocab_size, config.context, slots=1)
    with Engine(backend=backend, kv_spec=kv_spec, kv=kv, sampler=sampler, finish=finish, settings=bounds) as engine:
        planner = manager.prefill_planners().load("chunked")(chunk=128, level=engine.level, caps=backend.caps)
        prompt = np.asarray(tokenizer.encode("hello", add_special=False), np.int32)
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, seed=SEED)
        return generate(engine, SequenceSpec("self-test", prompt, params), planner=planner), backend.caps
