"""What a family reads by the size of a model, or takes for granted where a config is silent: no tensor is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlxcel.core.kv import FullKV, SlidingKV
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.gemma import Gemma2, Gemma3
from mlxcel.plugins.families.granite import Granite
from mlxcel.plugins.families.lfm import Lfm2
from mlxcel.plugins.families.phi import Phi3
from mlxcel.plugins.families.qwen import Qwen2
from mlxcel.plugins.families.smollm import SmolLM3

HEADS, HEAD_DIM, WIDTH = 4, 8, 64

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "max_position_embeddings": 8192,
}


def headers(naming: str, config: dict[str, Any]) -> Any:
    tensors = {"token_embd.weight": SimpleNamespace(shape=(320, WIDTH))} if naming == "gguf" else {}
    return SimpleNamespace(naming=naming, config=config, tensors=tensors)


def gemma_metadata(layers: int) -> dict[str, Any]:
    return {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 2,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 512,
    }


@pytest.mark.parametrize(("family", "layers"), [(Gemma2(), 46), (Gemma3(), 62)])
def test_the_largest_gemma_scales_scores_by_its_width(family: Gemma2, layers: int) -> None:
    """Gemma 2 27B and Gemma 3 27B: 1 / sqrt(D / H), which GGUF metadata do not say; every other size 1 / sqrt(d).
    https://arxiv.org/abs/2408.00118, table 1; llama.cpp's models tell them by the number of layers too."""
    assert family.parse_config(headers("gguf", gemma_metadata(layers))).score_scale == (WIDTH / HEADS) ** -0.5
    for other in (layers - 1, layers + 1, 26, 34, 42, 48):
        assert family.parse_config(headers("gguf", gemma_metadata(other))).score_scale == HEAD_DIM**-0.5


@pytest.mark.parametrize("family", [Gemma2(), Gemma3()])
def test_gemma_computes_its_own_activation_alone(family: Gemma2) -> None:
    """`hidden_activation` is what published configs have; its value is never ignored."""
    assert family.parse_config(headers("hf", {"hidden_activation": "gelu_pytorch_tanh"})).activation == "gelu_tanh"
    assert family.parse_config(headers("hf", {})).activation == "gelu_tanh"
    with pytest.raises(CheckpointError, match="hidden_activation = 'silu'"):
        family.parse_config(headers("hf", {"hidden_activation": "silu"}))


@pytest.mark.parametrize(
    ("family", "scale", "caps", "window"),
    [(Gemma2(), 256**-0.5, (50.0, 30.0), 4096), (Gemma3(), 256**-0.5, (0.0, 0.0), 4096)],
)
def test_gemma_without_a_word_is_the_size_that_its_config_class_describes(
    family: Gemma2, scale: float, caps: tuple[float, float], window: int
) -> None:
    """transformers writes only what differs from its defaults, so a file may leave all of these out."""
    config = family.parse_config(headers("hf", {}))
    assert config.score_scale == scale
    assert (config.attention_softcap, config.final_softcap) == caps
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (26, 2304, 8, 4)
    assert {layer.window for layer in family.kv_spec(config).layers if isinstance(layer, SlidingKV)} == {window}


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma_3_sees_everything_in_every_nth_layer(key: str) -> None:
    """Published configs have the first spelling; transformers writes the second one."""
    config = Gemma3().parse_config(headers("hf", {key: 4, "num_hidden_layers": 9}))
    full = [isinstance(layer, FullKV) for layer in Gemma3().kv_spec(config).layers]
    assert full == [False, False, False, True, False, False, False, True, False]


@pytest.mark.parametrize(("said", "first"), [({}, 28), ({"max_window_layers": 3}, 3), ({"max_window_layers": 0}, 0)])
def test_qwen_2_has_windows_from_max_window_layers_on(said: dict[str, int], first: int) -> None:
    """Without the key from layer 28 on, its default in transformers."""
    config = {**LLAMA_LIKE, "num_hidden_layers": 30, "sliding_window": 512}
    qwen = Qwen2()
    on = qwen.parse_config(headers("hf", {**config, "use_sliding_window": True, **said}))
    assert [isinstance(layer, SlidingKV) for layer in qwen.kv_spec(on).layers] == [i >= first for i in range(30)]
    off = qwen.parse_config(headers("hf", {**config, **said}))
    assert all(isinstance(layer, FullKV) for layer in qwen.kv_spec(off).layers)


def test_smollm_3_has_windows_in_the_layers_that_turn_nothing() -> None:
    """Where the config lists no `layer_types`, as transformers fills them in."""
    config = {**LLAMA_LIKE, "sliding_window": 512}
    family = SmolLM3()
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [1, 1, 1, 0, 1]),
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, [0, 1, 1, 0, 1]),
    ]
    for said, turned in cases:
        on = family.parse_config(headers("hf", {**config, **said, "use_sliding_window": True}))
        assert [kind.rope is not None for kind in on.kinds] == [bool(turns) for turns in turned]
        assert [isinstance(layer, FullKV) for layer in family.kv_spec(on).layers] == [bool(turns) for turns in turned]
        off = family.parse_config(headers("hf", {**config, **said}))
        assert all(isinstance(layer, FullKV) for layer in family.kv_spec(off).layers)


def test_granite_without_its_factors_has_those_of_its_config_class() -> None:
    """All are 1, the scale of the scores too: not that of the head dimension."""
    config = Granite().parse_config(headers("hf", LLAMA_LIKE))
    assert (config.embed_scale, config.residual_scale, config.score_scale, config.logits_divisor) == (1, 1, 1, 1)
    scaled = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.5,
        "logits_scaling": 8,
    }
    config = Granite().parse_config(headers("hf", {**LLAMA_LIKE, **scaled}))
    assert (config.embed_scale, config.residual_scale, config.score_scale, config.logits_divisor) == (12, 0.22, 0.5, 8)


@pytest.mark.parametrize(
    ("said", "ffn"),
    [
        ({}, 768),
        ({"block_multiple_of": 100}, 700),
        ({"block_ffn_dim_multiplier": 1.5}, 1024),
        ({"block_ffn_dim_multiplier": 1.5, "block_multiple_of": 1}, 999),
        ({"block_auto_adjust_ff_dim": False}, 1000),
        ({"block_ff_dim": 300}, 256),
    ],
)
def test_lfm_2_rounds_two_thirds_of_its_width_up(said: dict[str, Any], ffn: int) -> None:
    """int(multiplier * int(2 / 3 * 1000)), up to whole multiples, as transformers' Lfm2MLP; the old key goes first."""
    config = {**LLAMA_LIKE, "intermediate_size": 1000, **said}
    assert Lfm2().parse_config(headers("hf", config)).ffn == ffn


@pytest.mark.parametrize(
    ("said", "attends"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"full_attn_idxs": [1, 4]}, [0, 1, 0, 0, 1]),
        ({"full_attn_idxs": [1, 4], "layer_types": ["conv"] * 3 + ["full_attention"] * 2}, [0, 0, 0, 1, 1]),
    ],
)
def test_lfm_2_attends_in_the_layers_that_its_config_names(said: dict[str, Any], attends: list[int]) -> None:
    config = Lfm2().parse_config(headers("hf", {**LLAMA_LIKE, **said}))
    assert [kind.attends for kind in config.kinds] == [bool(attending) for attending in attends]


def test_fused_weights_have_the_biases_that_a_config_asks_for() -> None:
    """One for q, k and v together, one for gate and up, as wide as the weights they belong to."""
    family, said = Phi3(), {**LLAMA_LIKE, "attention_bias": True, "mlp_bias": True}
    names = family.schema(family.parse_config(headers("hf", said))).tensor_names("hf")
    shapes = {
        "self_attn.qkv_proj": 64 + 2 * 32,
        "self_attn.o_proj": 64,
        "mlp.gate_up_proj": 2 * 96,
        "mlp.down_proj": 64,
    }
    for name, rows in shapes.items():
        assert names[f"model.layers.4.{name}.bias"].shape == (rows,)
    plain = family.schema(family.parse_config(headers("hf", LLAMA_LIKE))).tensor_names("hf")
    assert not [name for name in plain if name.endswith(".bias")]
