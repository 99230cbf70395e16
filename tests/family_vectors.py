"""Reads the reference vectors in tests/data/families and writes the checkpoints that they were made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from safetensors.numpy import save_file
from seeded_weights import seeded_tensors

NEAR_TOLERANCE = 5e-5
"""Sums in another order move these logits, which are of order 1, by up to 2e-5; each feature moves them by 0.3."""
FAR_TOLERANCE = 1e-3
"""torch rounds a frequency after each step: by position 9000 that turns a head by another 5e-4 radians."""
FAR_FROM = 512

FOLDER = Path(__file__).parent / "data" / "families"


@attrs.frozen
class Expected:
    """What transformers computed in one float32 pass over all the ids."""

    ids: np.ndarray  # [T] int32
    positions: np.ndarray  # [P] int32, ascending, the positions that `logits` are of
    logits: np.ndarray  # [P, V] float32

    @property
    def tolerance(self) -> float:
        """How far a right float32 implementation may be from `logits`, absolutely."""
        return NEAR_TOLERANCE if len(self.ids) < FAR_FROM else FAR_TOLERANCE


def cases(*model_types: str) -> list[str]:
    """Names of the cases, sorted; only those of the given config.json model types, if any are given."""
    names = sorted(path.parent.name for path in FOLDER.glob("*/logits.npz"))
    return [name for name in names if not model_types or config(name)["model_type"] in model_types]


def config(case: str, *, published: bool = False) -> dict[str, Any]:
    """The case's config.json: as transformers 5 writes it, or as checkpoints of the family publish it."""
    found: dict[str, Any] = json.loads((FOLDER / case / ("published.json" if published else "config.json")).read_text())
    return found


def norm_centre(config: Mapping[str, Any]) -> float:
    """Gemma's norms multiply by 1 + weight, so theirs lie around 0."""
    return 0.0 if config["model_type"].startswith("gemma") else 1.0


def tensors(case: str) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by its published name, float32."""
    shapes = json.loads((FOLDER / case / "tensors.json").read_text())
    by_name = {name: tuple(shape) for name, shape in shapes.items()}
    return seeded_tensors(by_name, norm_centre=norm_centre(config(case)))


def write_checkpoint(case: str, folder: Path, *, published: bool = False) -> Path:
    """config.json and model.safetensors in `folder`, which is made if needed and returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(case, published=published), indent=2))
    save_file(tensors(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expected(case: str) -> Expected:
    """The vectors of the case."""
    with np.load(FOLDER / case / "logits.npz") as found:
        return Expected(found["ids"], found["positions"], found["logits"])
