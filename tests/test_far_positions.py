"""H-L1: logits of rows that are thousands of positions long, with every kind of rope."""

from itertools import combinations

import numpy as np
import pytest
from reference_forward import norm
from rope_vectors import far_vectors
from tiny_checkpoint import tiny_config, tiny_weights, write_safetensors, write_tiny_llama

from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.family_run import Feed, logits_of_rows

POSITIONS = (0, 1000, 9000)

TOLERANCE = 2e-5
"""Both sides turn by the same float32 angles; float32 cosines of up to 9000 radians and sums over 9001 keys were seen
to part from float64 ones by 7e-6, where another rope parts by 1 at least."""

SHAPE = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
ROPES = far_vectors()


def turned(x, positions, rope):
    """x [T, H, d] float64; the first 2n dims in halves, by transformers' own frequencies."""
    n = len(rope.frequencies)
    angle = (positions.astype(np.float32)[:, None] * rope.frequencies).astype(np.float64)[:, None]
    cos, sin = np.cos(angle) * rope.attention_factor, np.sin(angle) * rope.attention_factor
    first, second = x[..., :n], x[..., n : 2 * n]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * n :]], axis=-1)


def last_logits(tensors, config, ids, rope):
    """float64 logits [V] of the last of T tokens, from the formulas. In one layer no other token's attention counts."""
    w = {name.removeprefix("model.layers.0."): value.astype(np.float64) for name, value in tensors.items()}
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    embedded = w["model.embed_tokens.weight"][ids]
    x = norm(embedded, w["input_layernorm.weight"], eps)
    dim = config["head_dim"]
    positions = np.arange(len(ids))
    q = turned((x[-1:] @ w["self_attn.q_proj.weight"].T).reshape(1, heads, dim), positions[-1:], rope)[0]
    k = turned((x @ w["self_attn.k_proj.weight"].T).reshape(-1, 1, dim), positions, rope)[:, 0]
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


@pytest.fixture(scope="module")
def tensors():
    """Sharper scores than a tiny model has: among thousands of equal weights the order of the keys would not count."""
    made = tiny_weights(**SHAPE)
    made["model.layers.0.self_attn.q_proj.weight"] *= np.float32(4)
    return made


@pytest.fixture(scope="module")
def expected(ids, tensors):
    """float64 [3, V] at POSITIONS, by the name of the rope."""
    config = tiny_config(**SHAPE)
    return {
        name: np.stack([last_logits(tensors, {**config, **rope.config}, ids[: last + 1], rope) for last in POSITIONS])
        for name, rope in ROPES.items()
    }


@pytest.mark.parametrize("name", ROPES)
def test_h_l1_logits_at_positions_0_1000_9000(tmp_path, ids, tensors, expected, name):
    folder = write_tiny_llama(tmp_path, **SHAPE, config_overrides=ROPES[name].config)
    write_safetensors(folder / "model.safetensors", tensors)
    steps = [[Feed(0, start, end)] for start, end in ((0, 1), (1, 1001), (1001, 9001))]
    (ours,) = logits_of_rows(Llama(), SafetensorsCheckpoint(folder), [ids], steps, last_only=True)
    for logits, wanted, position in zip(ours, expected[name], POSITIONS, strict=True):
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE, err_msg=f"position {position}")


@pytest.mark.parametrize(("name", "other"), [*combinations(ROPES, 2)])
def test_h_l1_no_rope_passes_for_another(expected, name, other):
    """So that one which is read and not used would show above."""
    if {name, other} == {"none", "dynamic, short"}:
        np.testing.assert_array_equal(expected[name], expected[other])
    else:
        assert np.abs(expected[name][-1] - expected[other][-1]).max() > 100 * TOLERANCE
