"""A DecoderConfig from config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder_config import ACTIVATIONS, MOST_EXPERTS, MOST_LAYERS, Experts
from mlxcel.plugins.families.rope_hf import FULL, SLIDING

HF_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "qk_norm": (None, False),
    "lm_head_bias": (None, False),
    "is_encoder_decoder": (None, False),
}
"""Keys that change the mathematics, and their values that do not. A family reads those it knows; the others must be
neutral, or the model would run and be wrong."""


def fields_from_hf(keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
    """What every family reads, but for the layers' kinds."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    written = keys.word("hidden_act", (*ACTIVATIONS, *HF_ACTIVATIONS), default="silu")
    bias = keys.flag("attention_bias", False)
    return {
        "vocab_size": keys.size("vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.size("num_key_value_heads", heads),
        "head_dim": keys.size("head_dim", hidden // heads if hidden % heads == 0 else None),
        "ffn": keys.size("intermediate_size"),
        "norm_eps": keys.real("rms_norm_eps", 1e-6),
        "tied": keys.flag("tie_word_embeddings", "lm_head.weight" not in checkpoint.tensors),
        "activation": HF_ACTIVATIONS.get(written, written),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def windows_from_hf(keys: ConfigKeys, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees everything. `slides` says which have one where no `layer_types`
    does."""
    layers = keys.size("num_hidden_layers", largest=MOST_LAYERS)
    if keys.has("layer_types"):
        sliding = [kind == SLIDING for kind in keys.words("layer_types", (FULL, SLIDING), layers)]
    else:
        sliding = [slides(layer) for layer in range(layers)]
    if not any(sliding):
        return (None,) * layers
    window = keys.size("sliding_window")
    return tuple(window if slides else None for slides in sliding)


def experts_from_hf(keys: ConfigKeys) -> Experts:
    """The count under either of its names: published configs have the one, some writers the other."""
    name = "num_experts" if keys.has("num_experts") else "num_local_experts"
    return Experts(
        keys.size(name, largest=MOST_EXPERTS),
        keys.size("num_experts_per_tok"),
        keys.size("moe_intermediate_size" if keys.has("moe_intermediate_size") else "intermediate_size"),
        renormalise=keys.flag("norm_topk_prob", True),
    )
