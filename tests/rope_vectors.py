"""What transformers computes for many rope configs, the cases of data/ropes/ropes.json, and a config of every type."""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.rope import Rope
from mlxcel.plugins.families.rope_hf import rope_from_hf

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data/ropes/ropes.json").read_text())["cases"]


@attrs.frozen(eq=False)
class RopeVector:
    """`config` as in config.json; frequencies float32 [n] where rows are bounded by `context`."""

    name: str
    config: dict[str, Any]
    context: int
    frequencies: np.ndarray
    attention_factor: float


def rope_vectors() -> list[RopeVector]:
    """All cases, in the file's order. The far ones have a name of their own."""
    return [
        RopeVector(
            case.get("name", ""),
            case["config"],
            case["context"],
            np.frombuffer(bytes.fromhex(case["frequencies"]), "<f4"),
            case["attention_factor"],
        )
        for case in CASES
    ]


def far_vectors() -> dict[str, RopeVector]:
    """By name: ropes of a head of 16 dims for rows of 9001 positions."""
    return {vector.name: vector for vector in rope_vectors() if vector.name}


HEAD = 64
"""d of the configs below."""

NUMBERS = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0},
    "longrope": {**NUMBERS, "original_max_position_embeddings": 1024},
    "llama3": {"factor": 8.0, **LLAMA3},
}
"""A config of every type of scaling; with its `rope_type` it is complete."""


def hf(head_dim: int = HEAD, *, scaling: Any = None, **fields: Any) -> Rope:
    """The rope of a config.json with these fields."""
    config = {"max_position_embeddings": 4096, **fields}
    if scaling is not None:
        config["rope_scaling"] = scaling
    return rope_from_hf(ConfigKeys(config, "config.json"), head_dim)
