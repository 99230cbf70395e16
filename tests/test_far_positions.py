"""H-L1: logits of rows that are thousands of positions long, with and without llama3's ropes."""

import json

import numpy as np
import pytest
from reference_forward import inverse_frequencies, norm, rotate
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_llama

from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.family_run import Feed, logits_of_rows

POSITIONS = (0, 1000, 9000)

TOLERANCE = 2e-5
"""Both sides turn by the same float32 angles; float32 cosines of up to 9000 radians and sums over 9001 keys were seen
to part from float64 ones by 3e-6, where another rope parts by 3."""

SHAPE = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def last_logits(tensors, config, ids):
    """float64 logits [V] of the last of T tokens, from the formulas. In one layer no other token's attention counts."""
    w = {name.removeprefix("model.layers.0."): value.astype(np.float64) for name, value in tensors.items()}
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    embedded = w["model.embed_tokens.weight"][ids]
    x = norm(embedded, w["input_layernorm.weight"], eps)
    dim = config["hidden_size"] // heads
    frequencies = inverse_frequencies(dim, config["rope_theta"], config.get("rope_scaling"))
    positions = np.arange(len(ids))
    q = rotate((x[-1:] @ w["self_attn.q_proj.weight"].T).reshape(1, heads, dim), positions[-1:], frequencies)[0]
    k = rotate((x @ w["self_attn.k_proj.weight"].T).reshape(-1, 1, dim), positions, frequencies)[:, 0]
    v = x @ w["self_attn.v_proj.weight"].T
    weights = np.exp(q @ k.T / np.sqrt(dim))
    mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ v
    h = embedded[-1] + w["self_attn.o_proj.weight"] @ mixed.reshape(-1)
    x = norm(h, w["post_attention_layernorm.weight"], eps)
    gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
    h = h + w["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return w["model.embed_tokens.weight"] @ norm(h, w["model.norm.weight"], eps)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(7).integers(0, 320, POSITIONS[-1] + 1)


@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["none", "llama3"])
def test_h_l1_logits_at_positions_0_1000_9000(tmp_path, ids, scaling):
    """And neither is what the other rope gives, so that a rope which is read and not used would show."""
    overrides = {"rope_scaling": scaling, "max_position_embeddings": 16384}
    folder = write_tiny_llama(tmp_path, **SHAPE, config_overrides=overrides)
    tensors = tiny_weights(**SHAPE)
    # Sharper scores: with thousands of keys of equal weight the order of the keys would hardly count.
    tensors["model.layers.0.self_attn.q_proj.weight"] *= np.float32(4)
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    steps = [[Feed(0, start, end)] for start, end in ((0, 1), (1, 1001), (1001, 9001))]
    (ours,) = logits_of_rows(Llama(), SafetensorsCheckpoint(folder), [ids], steps, last_only=True)
    for logits, position in zip(ours, POSITIONS, strict=True):
        prompt = ids[: position + 1]
        expected = last_logits(tensors, config, prompt)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE, err_msg=f"position {position}")
        other = {**config, "rope_scaling": LLAMA3 if scaling is None else None}
        wrong = last_logits(tensors, other, prompt)
        assert position == 0 or np.abs(wrong - expected).max() > 100 * TOLERANCE
