"""The recipe of the reference checkpoints: a change of one bit would make every vector of the families worthless."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from family_vectors import cases, config, expected, tensors
from seeded_weights import seeded_tensor, uniform


def test_the_words_are_those_of_philox_keyed_by_the_name() -> None:
    """Against the counter generator written out from its paper, https://doi.org/10.1145/2063384.2063405."""
    mask = 2**64 - 1
    key = int.from_bytes(hashlib.sha256(b"model.norm.weight").digest()[:16], "little")
    words: list[int] = []
    for block in range(1, 4):  # NumPy counts up before it makes a block
        counter, (k0, k1) = [block, 0, 0, 0], (key & mask, key >> 64)
        for _ in range(10):
            a, b = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
            counter = [(b >> 64) ^ counter[1] ^ k0, b & mask, (a >> 64) ^ counter[3] ^ k1, a & mask]
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        words += counter
    exact = np.array([(word >> 40) / 2**23 - 1 for word in words], np.float64)
    np.testing.assert_array_equal(uniform("model.norm.weight", 12).astype(np.float64), exact)


@pytest.mark.parametrize(
    ("name", "shape", "first"),
    [
        (
            "model.embed_tokens.weight",
            (128, 64),
            ("-0x1.9fb4420000000p-3", "0x1.e42e120000000p-4", "-0x1.9665780000000p-4"),
        ),
        (
            "model.layers.1.self_attn.q_proj.weight",
            (96, 64),
            ("0x1.8432f80000000p-3", "0x1.6e4c9a0000000p-4", "-0x1.85e2b80000000p-3"),
        ),
        (
            "model.layers.1.self_attn.q_proj.bias",
            (96,),
            ("-0x1.7277600000000p-5", "-0x1.e416c00000000p-6", "0x1.7026d80000000p-3"),
        ),
        ("model.norm.weight", (64,), ("0x1.315e8e0000000p+0", "0x1.e0502c0000000p-1", "0x1.292bca0000000p+0")),
        (
            "model.layers.0.conv.conv.weight",
            (64, 1, 3),
            ("0x1.6af72c0000000p+0", "0x1.c231bc0000000p-2", "-0x1.6335fc0000000p-1"),
        ),
    ],
)
def test_the_values_never_change(name: str, shape: tuple[int, ...], first: tuple[str, ...]) -> None:
    """Bits, as hexadecimal float32."""
    made = seeded_tensor(name, shape)
    assert made.shape == shape
    assert made.dtype == np.float32
    assert tuple(float(value).hex() for value in made.reshape(-1)[:3]) == first


def test_norms_move_with_their_centre_alone() -> None:
    """Gemma's norms are stored around 0, the others' around 1."""
    around_one = seeded_tensor("model.norm.weight", (64,))
    around_zero = seeded_tensor("model.norm.weight", (64,), norm_centre=0.0)
    assert abs(float(around_one.mean()) - 1) < 0.1
    assert np.abs(around_zero).max() <= 0.25
    bias = "model.layers.0.mlp.up_proj.bias"
    np.testing.assert_array_equal(seeded_tensor(bias, (96,)), seeded_tensor(bias, (96,), norm_centre=0.0))


@pytest.mark.parametrize("case", cases())
def test_every_case_is_whole(case: str) -> None:
    """Ids within the vocabulary, finite logits of order 1, tensors that fit the config's widths."""
    found = expected(case)
    settings = config(case)
    text = settings.get("text_config", settings)
    assert found.ids.dtype == found.positions.dtype == np.int32
    assert 0 <= found.ids.min() <= found.ids.max() < text["vocab_size"]
    assert np.all(np.diff(found.positions) > 0)
    assert found.positions[-1] == len(found.ids) - 1
    assert found.logits.shape == (len(found.positions), text["vocab_size"])
    assert found.logits.dtype == np.float32
    assert 0.3 < float(found.logits.std()) < 3
    weights = tensors(case)
    embeddings = [value.shape for name, value in weights.items() if name.endswith("embed_tokens.weight")]
    assert embeddings == [(text["vocab_size"], text["hidden_size"])]
    layers = {name.split("layers.")[1].split(".")[0] for name in weights if "layers." in name and "vision" not in name}
    assert layers == {str(index) for index in range(text["num_hidden_layers"])}


def test_both_spellings_of_a_config_name_one_model() -> None:
    """What transformers renames on writing is renamed, so that a reader meets both spellings."""
    for case in cases():
        published, written = config(case, published=True), config(case)
        assert published["model_type"] == written["model_type"]
        assert "torch_dtype" in published
        assert "dtype" in written
