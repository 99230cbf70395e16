"""The family against the conformance kits of mlxcel and a forward of its own."""

from functools import partial

import pytest
from mlxcel_family_example.gpt_neox import GPTNeoX
from neox_checkpoint import neox_config, neox_logits, neox_weights, write_neox

from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.family_kit import check_family
from mlxcel.testing.kv_kit import check_kv_spec


@pytest.mark.parametrize("changes", [{}, {"use_parallel_residual": False}, {"rotary_pct": 1.0}])
def test_the_family_keeps_all_laws_and_agrees_with_the_formulas(tmp_path, changes):
    config = neox_config(**changes)
    reference = partial(neox_logits, config, neox_weights(config))
    checkpoint = SafetensorsCheckpoint(write_neox(tmp_path, **changes))
    check_family(GPTNeoX(), checkpoint, reference=reference)
    check_kv_spec(GPTNeoX(), checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 30}, "hidden_size 30 does not divide into 4 heads"),
        ({"rotary_pct": 0.1}, "rotary_pct 0.1 of a head of 8 is 0 dims"),
        ({"rotary_pct": 2.0}, "rotary_pct 2 of a head of 8 is 16 dims"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ({"tie_word_embeddings": True}, "tied embeddings"),
        ({"attention_bias": False}, "without biases"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
        ({"vocab_size": None}, "config.json has no vocab_size"),
    ],
)
def test_a_config_that_it_cannot_run_is_refused_by_its_key(tmp_path, changes, words):
    (tmp_path / "model").mkdir()
    folder = write_neox(tmp_path / "model")
    checkpoint = SafetensorsCheckpoint(folder)
    checkpoint.config = {**checkpoint.config, **changes}
    with pytest.raises(CheckpointError, match=words.replace(".", r"\.")):
        GPTNeoX().parse_config(checkpoint)
