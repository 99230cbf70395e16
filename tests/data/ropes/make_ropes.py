"""Writes ropes.json: what transformers computes for many rope configs. Run by hand, with torch and transformers.

    python tests/data/ropes/make_ropes.py

A case is `config` (fields of config.json), `context` (the length that the rows are said to have), `frequencies` as the
hexadecimal bytes of little-endian float32 [n], and `attention_factor`. Cases with a `name` are those whose logits are
looked at far from the start.
"""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LARGE = 131072


def cases() -> list[tuple[dict[str, Any], int]]:
    """Configs, each with a context."""
    found: list[tuple[dict[str, Any], int]] = []

    def add(scaling: dict[str, Any] | None, context: int = 0, **fields: Any) -> None:
        config = {"head_dim": 64, "rope_theta": 10000.0, "max_position_embeddings": 4096, **fields}
        found.append((config if scaling is None else {**config, "rope_scaling": scaling}, context or 4096))

    for dim, theta in product((64, 96, 128, 80), (10000.0, 500000.0, 1000000.0)):
        add(None, head_dim=dim, rope_theta=theta)
        add({"rope_type": "linear", "factor": 4.0}, head_dim=dim, rope_theta=theta)
        add({"rope_type": "yarn", "factor": 4.0}, head_dim=dim, rope_theta=theta)
    add({"type": "linear", "factor": 2.5})
    add({"rope_type": "linear", "factor": 8.0}, head_dim=256, rope_theta=1e6, max_position_embeddings=LARGE)

    for factor, dim in product((2.0, 4.0, 2.5), (64, 4, 128)):
        for context in (1024, 4096, int(4096 * factor)):
            add({"rope_type": "dynamic", "factor": factor}, context, head_dim=dim)

    for options in (
        {},
        {"factor": 1.0},
        {"factor": 32.0},
        {"beta_fast": 64, "beta_slow": 2},
        {"beta_fast": 4.0, "beta_slow": 4.0},
        {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
        {"truncate": False},
        {"truncate": False, "beta_fast": 16.0},
        {"truncate": True},
        {"attention_factor": 1.25},
        {"mscale": 0.5},
        {"mscale_all_dim": 0.8},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.3},
        {"mscale": 0.7, "mscale_all_dim": 0.0},
        {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 0.9},
        {"factor": None},
    ):
        scaling = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048, **options}
        add(scaling, max_position_embeddings=32768)
        add(scaling, max_position_embeddings=32768, rope_theta=150000.0, head_dim=96, partial_rotary_factor=0.5)
    add({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, rope_theta=1e6, head_dim=128,
        max_position_embeddings=32768)  # fmt: skip

    for low, high, factor, original in ((1.0, 4.0, 32.0, 8192), (1.0, 4.0, 8.0, 8192), (1.5, 6.0, 3.0, 2048)):
        numbers = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
        for dim in (64, 128):
            add({"rope_type": "llama3", "factor": factor, **numbers}, head_dim=dim, rope_theta=5e5,
                max_position_embeddings=LARGE)  # fmt: skip

    for dim, part in ((96, 1.0), (128, 0.75), (8, 1.0)):
        n = int(dim * part) // 2
        short = [round(1 + 0.07 * i + 0.01 * math.sin(i), 6) for i in range(n)]
        long = [round(1.2 + 60 * (i / n) ** 2, 6) for i in range(n)]
        numbers = {"short_factor": short, "long_factor": long}
        original = {"original_max_position_embeddings": 4096}
        fields = {"head_dim": dim, "partial_rotary_factor": part, "max_position_embeddings": LARGE}
        for options in ({}, {"factor": 16.0}, {"attention_factor": 1.1}, {"factor": 1.0}):
            for context in (100, 4096, 4097, LARGE):
                add({"rope_type": "longrope", **numbers, **original, **options}, context, **fields)
        add({"type": "longrope", **numbers}, LARGE, **fields, **original)
        add({"rope_type": "longrope", **numbers}, 4096, **fields, **original)

    for part in (0.25, 0.5, 0.75):
        add(None, head_dim=128, partial_rotary_factor=part)
        add({"rope_type": "linear", "factor": 2.0}, head_dim=96, partial_rotary_factor=part)
        add({"rope_type": "dynamic", "factor": 2.0}, 8192, head_dim=96, partial_rotary_factor=part)
    return found


def far_cases() -> dict[str, tuple[dict[str, Any], int]]:
    """By name. A model of these is run with rows of up to 9001 positions."""
    fields = {"head_dim": 16, "rope_theta": 10000.0, "max_position_embeddings": 16384}
    short, long = ([round(1 + slope * i + 0.01 * math.sin(i), 6) for i in range(8)] for slope in (0.1, 3.0))
    divisors = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024}
    beta = {"beta_fast": 12.0, "beta_slow": 1.5, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.6}
    scalings: dict[str, dict[str, Any]] = {
        "llama3": {"rope_type": "llama3", "factor": 32.0, **llama3},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "yarn": yarn,
        "yarn with every option": {**yarn, **beta},
        "yarn with an attention factor": {**yarn, "attention_factor": 0.8},
        "longrope, long": {**divisors, "original_max_position_embeddings": 4096},
        "longrope, short": {**divisors, "original_max_position_embeddings": 9001, "factor": 8.0},
    }
    found = {name: ({**fields, "rope_scaling": scaling}, 9001) for name, scaling in scalings.items()}
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    return {
        "none": (fields, 9001),
        **found,
        "dynamic, long": ({**fields, **dynamic, "max_position_embeddings": 4096}, 16384),
        "dynamic, short": ({**fields, **dynamic}, 9001),
        "half of the head": ({**fields, "partial_rotary_factor": 0.5}, 9001),
        "half of the head, yarn": ({**fields, "partial_rotary_factor": 0.5, "rope_scaling": yarn}, 9001),
    }


def rope_of(fields: dict[str, Any], context: int) -> tuple[torch.Tensor, float]:
    """By the function of that type; for no scaling, by linear scaling of 1, which changes no bit."""
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, **fields)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        config.rope_parameters.update(rope_type="linear", factor=1.0)
        kind = "linear"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != fields.get("partial_rotary_factor", 1.0):
        raise RuntimeError(f"transformers reads partial_rotary_factor of {fields} otherwise")
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=context)


def main() -> None:
    torch.set_num_threads(1)
    written: list[str] = []
    named = [(name, *case) for name, case in far_cases().items()]
    for name, fields, context in [*named, *(("", *case) for case in cases())]:
        frequencies, factor = rope_of(json.loads(json.dumps(fields)), context)
        values = frequencies.to(torch.float32).numpy().astype("<f4").tobytes().hex()
        case: dict[str, Any] = {"name": name} if name else {}
        case |= {"config": fields, "context": context, "frequencies": values, "attention_factor": float(factor)}
        written.append(json.dumps(case))
    head = f'{{"made_with": "transformers {transformers.__version__}, torch {torch.__version__}", "cases": [\n'
    Path(__file__).with_name("ropes.json").write_text(head + ",\n".join(written) + "\n]}\n")


if __name__ == "__main__":
    main()
