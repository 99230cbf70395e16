"""Each family against logits that transformers computed, on the same weights in every spelling a checkpoint has.

The vectors and the script that made them are in tests/data/families.
"""

import family_vectors
import numpy as np
import pytest
from gguf_spelling import gguf_cases, write_gguf
from tested_backends import loaded_family

from mlxcel.plugins.builtin import mlxcel_families
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.family_kit import check_family
from mlxcel.testing.kv_kit import check_kv_spec

TOLERANCE = 1e-4
"""Of the largest logit: two float32 implementations differ by some 3e-6 of it here, a wrong formula by far more."""
LONG = 4000
"""Positions from which one forward takes more than a few seconds."""

WRITERS = {
    "transformers 5": lambda case, folder: SafetensorsCheckpoint(family_vectors.write_checkpoint(case, folder / "new")),
    "as published": lambda case, folder: SafetensorsCheckpoint(
        family_vectors.write_checkpoint(case, folder / "old", published=True)
    ),
    "GGUF": lambda case, folder: GgufCheckpoint(write_gguf(case, folder / "model.gguf")),
}


def spellings():
    return [
        pytest.param(case, spelling, marks=[pytest.mark.slow] if len(family_vectors.expected(case).ids) > LONG else [])
        for case in family_vectors.cases()
        for spelling in WRITERS
        if spelling != "GGUF" or case in gguf_cases()
    ]


def family_of(checkpoint):
    (spec,) = [spec for spec in mlxcel_families() if spec.claims(checkpoint.naming, checkpoint.architecture)]
    return spec.load()()


@pytest.mark.on_jax(most=3)
@pytest.mark.parametrize(("case", "spelling"), spellings())
def test_logits_are_those_of_transformers(backend, tmp_path, case, spelling):
    """H-L1, H-L3, H-L5, H-L7, H-L21 and the families' own features, at near and far positions."""
    checkpoint = WRITERS[spelling](case, tmp_path)
    expected = family_vectors.expected(case)
    logits = loaded_family(family_of(checkpoint), checkpoint).logits(expected.ids)[expected.positions]
    np.testing.assert_allclose(logits, expected.logits, rtol=0, atol=TOLERANCE * np.abs(expected.logits).max())


FEATURES = (
    *("gemma2", "gemma3-seven-layers", "gemma3-wrapper", "granite-biases", "lfm2-conv-bias", "llama-biases-tied"),
    *("mistral-window", "mixtral", "phi3-window", "qwen2-window", "qwen3", "qwen3-moe-mixed", "smollm3-layers"),
)
"""One case of each feature: the laws of the kit do not follow from the numbers of a config."""


@pytest.mark.parametrize("case", FEATURES)
def test_every_family_passes_the_kit(tmp_path, case):
    checkpoint = WRITERS["as published"](case, tmp_path)
    twin = WRITERS["GGUF"](case, tmp_path) if case in gguf_cases() else None
    check_family(family_of(checkpoint), checkpoint, twin=twin)
    check_kv_spec(family_of(checkpoint), checkpoint)
