"""Writes the reference vectors of every model family with transformers, an implementation that is not ours.

    pip install attrs torch transformers safetensors        # made with torch 2.13, transformers 5.24
    PYTHONPATH=tests python tests/data/families/make_vectors.py [CASE ...]

Run by hand. A case is a folder beside this script:

    published.json  the config as checkpoints of that family publish it (`rope_theta`, `rope_scaling`, `torch_dtype`)
    config.json     the same config as transformers writes it back (`rope_parameters`, `layer_types`, `dtype`)
    tensors.json    name -> shape of each tensor, as published checkpoints name them
    logits.npz      ids [T] int32, positions [P] int32, logits [P, V] float32 of one pass over all ids

Weights are made from their names by `seeded_weights.py`, so none are kept.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from case_configs import CASES, Case
from family_vectors import norm_centre
from safetensors import safe_open
from safetensors.numpy import save_file
from seeded_weights import seeded_tensors, uniform
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
CLOSEST_ROUTES = 1e-4
FULL_REPORT = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def published(name: str) -> str:
    """transformers 5 writes the vision tower without a level that published checkpoints have, and reads both."""
    return re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name)


def written_shapes(config: Any, folder: Path) -> dict[str, list[int]]:
    """Names and shapes in the file that transformers itself writes for this config."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            shapes |= {published(name): list(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys()}
    return dict(sorted(shapes.items()))


def token_ids(name: str, count: int, vocab: int) -> np.ndarray:
    """[T] int32 in [0, vocab), from the case's name."""
    return ((uniform(f"ids of {name}", count) + 1) / 2 * vocab).astype(np.int32)


def forward(folder: Path, ids: np.ndarray, positions: np.ndarray, attention: str) -> tuple[Any, np.ndarray]:
    """The loaded config and float32 [P, V] of one pass; every tensor of the folder must have found its place."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    wrong = {key: list(report[key]) for key in FULL_REPORT if report.get(key)}
    if wrong:
        raise SystemExit(f"{folder}: tensors did not fit: {wrong}")
    with torch.inference_mode():
        keep = torch.from_numpy(positions.astype(np.int64))
        result = model.eval()(torch.from_numpy(ids.astype(np.int64))[None], logits_to_keep=keep, use_cache=False)
    refuse_close_routes(model, ids)
    return model.config, result.logits[0].float().numpy()


def refuse_close_routes(model: Any, ids: np.ndarray) -> None:
    """A router's last chosen and first unchosen expert must be further apart than float32 sums in another order are."""
    if (used := getattr(model.config, "num_experts_per_tok", None)) is None:
        return
    with torch.inference_mode():
        result = model(torch.from_numpy(ids.astype(np.int64))[None], output_router_logits=True, use_cache=False)
    for layer in result.router_logits:
        ordered = layer.sort(dim=-1, descending=True).values
        gap = float((ordered[:, used - 1] - ordered[:, used]).min())
        if gap < CLOSEST_ROUTES:
            raise SystemExit(f"two experts are only {gap} apart: change the case")


def make(name: str, case: Case) -> str:
    target = HERE / name
    target.mkdir(exist_ok=True)
    (target / "published.json").write_text(json.dumps(case.config, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(case.config))
        config = AutoConfig.from_pretrained(folder)
        config.dtype = torch.float32
        shapes = written_shapes(config, Path(scratch) / "names")
        centre = norm_centre(case.config)
        weights = seeded_tensors({key: tuple(shape) for key, shape in shapes.items()}, norm_centre=centre)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        vocab = getattr(config, "text_config", config).vocab_size
        ids = token_ids(name, case.tokens, vocab)
        positions = np.array(case.positions or range(case.tokens), np.int32)
        read, logits = forward(folder, ids, positions, case.attention)
        read.save_pretrained(target)
        (folder / "config.json").write_text((target / "config.json").read_text())
        _, again = forward(folder, ids, positions, case.attention)
    if not np.array_equal(logits, again):
        raise SystemExit(f"{name}: the config that was written back gives other logits")
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(shape)}" for key, shape in shapes.items())
    (target / "tensors.json").write_text("{\n" + lines + "\n}\n")
    np.savez_compressed(target / "logits.npz", ids=ids, positions=positions, logits=logits)
    return f"{name}: {len(ids)} tokens, logits {list(logits.shape)}, spread {logits.std():.2f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or CASES:
        print(make(chosen, CASES[chosen]), flush=True)
