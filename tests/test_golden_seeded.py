"""Seeded replies are pinned (docs/spec/engine.md S36, H-F5)."""

import json

import pytest
from sampling_rows import FEATURE_SETS
from seeded_replies import TOKENS, golden_file, seeded_replies
from tested_backends import REFERENCE


@pytest.mark.on_jax(most=0)
def test_h_f5_seeded_ids_are_those_of_the_golden_file(backend):
    """A faster sampler must not change them silently: the file is made anew by seeded_replies.py, and that is said.

    It is of reference-numpy. On JAX the ids are the same: none of these draws is near a tie (H-F5, the top-2 rule).
    """
    golden = json.loads(golden_file(REFERENCE).read_text())
    assert golden.keys() == FEATURE_SETS.keys()
    assert all(len(ids) == TOKENS for ids in golden.values())
    assert seeded_replies(backend) == golden
