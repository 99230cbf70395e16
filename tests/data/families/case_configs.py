"""The cases of make_vectors.py: small configs in the spelling that published checkpoints of each family have."""

from __future__ import annotations

from typing import Any

import attrs

Config = dict[str, Any]


@attrs.frozen
class Case:
    """One config and the pass that is made over it."""

    config: Config
    tokens: int = 48  # T
    positions: tuple[int, ...] = ()  # all when empty
    attention: str = "eager"  # transformers' implementation; "sdpa" where [H, T, T] scores would not fit


FAR = (0, 1, 15, 16, 17, 100, 255, 256, 257, 600, 1000, 1198, 1199)
FAR_TOKENS = 1200
FARTHEST = (0, 1000, 9000)
FARTHEST_TOKENS = 9001


def decoder(architecture: str, model_type: str, **changes: Any) -> Config:
    """D = 64, H = 4, K = 2, F = 96, V = 128: what most families share."""
    base: Config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "float32",
    }
    return base | changes


def without(name: str, config: Config) -> Config:
    """As published configs do that rely on a default."""
    return {key: value for key, value in config.items() if key != name}


def llama(**changes: Any) -> Config:
    return decoder("LlamaForCausalLM", "llama", head_dim=24, attention_bias=False, mlp_bias=False) | changes


def far_llama(context: int, **scaling: Any) -> Config:
    return llama(max_position_embeddings=context, rope_scaling=scaling)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}

LLAMA_CASES = {
    "llama-biases-tied": Case(
        without(
            "rope_theta", llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, intermediate_size=160)
        )
    ),
    "llama-untied": Case(llama(rope_theta=500000.0, num_key_value_heads=1, rms_norm_eps=1e-6)),
    "llama-rope-llama3": Case(
        far_llama(
            131072,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        | {"rope_theta": 500000.0},
        FARTHEST_TOKENS,
        FARTHEST,
        "sdpa",
    ),
    "llama-rope-llama3-short": Case(
        far_llama(
            2048,
            rope_type="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
        FAR_TOKENS,
        FAR,
    ),
    "llama-rope-linear": Case(far_llama(2048, type="linear", factor=4.0), FAR_TOKENS, FAR),
    "llama-rope-dynamic-within": Case(far_llama(2048, rope_type="dynamic", factor=4.0), FAR_TOKENS, FAR),
    "llama-rope-dynamic-full": Case(far_llama(300, type="dynamic", factor=4.0), FAR_TOKENS, FAR),
    "llama-rope-yarn": Case(
        far_llama(16384, **YARN | {"original_max_position_embeddings": 2048}), FARTHEST_TOKENS, FARTHEST, "sdpa"
    ),
    "llama-rope-yarn-betas": Case(far_llama(2048, **YARN, beta_fast=16.0, beta_slow=2.0), FAR_TOKENS, FAR),
    "llama-rope-yarn-attention-factor": Case(
        far_llama(2048, **YARN, attention_factor=1.3, beta_fast=16.0, beta_slow=2.0), FAR_TOKENS, FAR
    ),
    "llama-rope-yarn-mscale": Case(far_llama(2048, **YARN, mscale=0.707, mscale_all_dim=1.2), FAR_TOKENS, FAR),
    "llama-rope-yarn-one-mscale": Case(far_llama(2048, **YARN, mscale=0.707), FAR_TOKENS, FAR),
    "llama-rope-yarn-no-truncate": Case(far_llama(2048, **YARN, truncate=False), FAR_TOKENS, FAR),
}


def qwen(version: int, **changes: Any) -> Config:
    shared = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "rms_norm_eps": 1e-6}
    return decoder(f"Qwen{version}ForCausalLM", f"qwen{version}", **shared, rope_theta=1000000.0) | changes


QWEN_CASES = {
    "qwen2-biases": Case(qwen(2, tie_word_embeddings=True)),
    "qwen2-window": Case(qwen(2, num_hidden_layers=3, use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "qwen3": Case(qwen(3, head_dim=24, attention_bias=False, tie_word_embeddings=True)),
    "qwen3-biases": Case(qwen(3, head_dim=24, attention_bias=True)),
    "qwen3-yarn": Case(qwen(3, head_dim=24, attention_bias=False, rope_scaling=YARN), FAR_TOKENS, FAR),
}


def gemma(version: int, **changes: Any) -> Config:
    shared = {
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 20,
        "sliding_window": 16,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "rms_norm_eps": 1e-6,
    }
    base = decoder(f"Gemma{version}ForCausalLM", "gemma2" if version == 2 else "gemma3_text", **shared)
    del base["hidden_act"]
    return base | changes


GEMMA3 = {
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
GEMMA3_TEXT_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "query_pre_attn_scalar", "sliding_window", "rope_scaling", "rms_norm_eps"),
    *("max_position_embeddings", "hidden_activation"),
)

GEMMA_CASES = {
    "gemma2": Case(
        gemma(2, hidden_act="gelu_pytorch_tanh", attn_logit_softcapping=5.0, final_logit_softcapping=3.0), 80
    ),
    "gemma2-plain-scale": Case(
        gemma(
            2,
            hidden_act="gelu_pytorch_tanh",
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            query_pre_attn_scalar=24,
        ),
        80,
    ),
    "gemma3-layer-types": Case(
        gemma(
            3,
            **GEMMA3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        ),
        80,
    ),
    "gemma3-seven-layers": Case(
        gemma(
            3,
            **GEMMA3 | {"rope_local_base_freq": 20000.0},
            num_hidden_layers=7,
            sliding_window_pattern=6,
            query_pre_attn_scalar=24,
        ),
        80,
    ),
    "gemma3-defaults": Case(
        gemma(3, num_hidden_layers=7, rope_theta=1000000.0, rope_local_base_freq=10000.0, query_pre_attn_scalar=24), 80
    ),
    "gemma3-wrapper": Case(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "boi_token_index": 120,
            "eoi_token_index": 121,
            "image_token_index": 127,
            "eos_token_id": [1, 106],
            "initializer_range": 0.02,
            "mm_tokens_per_image": 4,
            "torch_dtype": "float32",
            "text_config": {
                key: value
                for key, value in gemma(3, **GEMMA3, num_hidden_layers=7, query_pre_attn_scalar=24).items()
                if key in GEMMA3_TEXT_KEYS
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "image_size": 32,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 8,
                "vision_use_head": False,
            },
        },
        80,
    ),
}


def mistral(**changes: Any) -> Config:
    return decoder("MistralForCausalLM", "mistral", head_dim=24) | changes


def phi3(**changes: Any) -> Config:
    shared = {"original_max_position_embeddings": 2048, "rope_scaling": None, "sliding_window": None}
    return decoder("Phi3ForCausalLM", "phi3", attention_bias=False, **shared) | changes


LONGROPE = {
    "short_factor": [1.0, 1.05, 1.1, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 1.3, 2.1, 4.4, 7.9, 8.5],
}


def smollm3(**changes: Any) -> Config:
    shared = {"no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None, "num_hidden_layers": 4}
    base = decoder("SmolLM3ForCausalLM", "smollm3", attention_bias=False, mlp_bias=False, **shared)
    return base | {"rope_theta": 50000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-6} | changes


def granite(**changes: Any) -> Config:
    multipliers = {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.15,
        "logits_scaling": 2.5,
    }
    base = decoder("GraniteForCausalLM", "granite", attention_bias=False, mlp_bias=False, **multipliers)
    return base | {"tie_word_embeddings": True, "rope_scaling": None} | changes


DENSE_CASES = {
    "mistral-window": Case(mistral(sliding_window=16)),
    "mistral-null-window": Case(mistral(sliding_window=None, rope_theta=1000000.0)),
    "phi3-window": Case(phi3(sliding_window=16)),
    "phi3-partial-half": Case(phi3(partial_rotary_factor=0.5, tie_word_embeddings=True)),
    "phi3-longrope-short": Case(
        phi3(
            partial_rotary_factor=0.75,
            original_max_position_embeddings=256,
            rope_scaling={"type": "longrope", **LONGROPE},
        ),
        256,
        (0, 1, 15, 100, 200, 254, 255),
    ),
    "phi3-longrope-long": Case(
        phi3(
            partial_rotary_factor=0.75,
            original_max_position_embeddings=256,
            rope_scaling={"type": "longrope", **LONGROPE},
        ),
        FAR_TOKENS,
        FAR,
    ),
    "smollm3": Case(smollm3(no_rope_layers=[1, 1, 1, 0])),
    "smollm3-interval": Case(smollm3(no_rope_layer_interval=2)),
    "smollm3-layers": Case(smollm3(no_rope_layers=[0, 1, 0, 0], attention_bias=True, mlp_bias=True)),
    "granite": Case(granite()),
    "granite-biases": Case(granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
}


def qwen3_moe(**changes: Any) -> Config:
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    shared = {"head_dim": 24, "attention_bias": False, "use_sliding_window": False, "sliding_window": None}
    base = decoder("Qwen3MoeForCausalLM", "qwen3_moe", **shared, max_window_layers=2, rope_scaling=None)
    return base | experts | {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6} | changes


def mixtral(**changes: Any) -> Config:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
    base = decoder("MixtralForCausalLM", "mixtral", **experts, router_aux_loss_coef=0.02, sliding_window=None)
    return base | {"rope_theta": 1000000.0} | changes


EXPERT_CASES = {
    "qwen3-moe": Case(qwen3_moe()),
    "qwen3-moe-unnormed": Case(qwen3_moe(norm_topk_prob=False, num_experts_per_tok=2, tie_word_embeddings=True)),
    "qwen3-moe-mixed": Case(qwen3_moe(num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3])),
    "mixtral": Case(mixtral()),
    "mixtral-window": Case(mixtral(sliding_window=16, num_experts_per_tok=3)),
}


def lfm2(**changes: Any) -> Config:
    base: Config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_heads": 4,
        "max_position_embeddings": 2048,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "block_auto_adjust_ff_dim": True,
        "block_dim": 64,
        "block_ff_dim": 140,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 32,
        "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": 64,
        "conv_dim_out": 64,
        "conv_use_xavier_init": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.02,
        "theta": 1000000.0,
        "tie_embedding": True,
        "use_cache": True,
        "use_pos_enc": True,
        "torch_dtype": "float32",
    }
    return base | changes


STATE_CASES = {
    "lfm2": Case(lfm2(layer_types=["conv", "conv", "full_attention", "conv"]), 40),
    "lfm2-conv-bias": Case(
        lfm2(
            full_attn_idxs=[1, 3],
            conv_bias=True,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
            block_ff_dim=96,
            tie_embedding=False,
        ),
        40,
    ),
}

CASES: dict[str, Case] = LLAMA_CASES | QWEN_CASES | GEMMA_CASES | DENSE_CASES | EXPERT_CASES | STATE_CASES
