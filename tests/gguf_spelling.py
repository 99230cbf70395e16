"""Writes a case of tests/data/families as the GGUF file that llama.cpp's converter makes of the same checkpoint.

Facts are from llama.cpp's conversion/*.py and src/models/*.cpp; names come from the `gguf` package's own tables. All
tensors are float32 and no tokenizer is written. Keys are said without their prefix `<architecture>.`.

Every architecture has block_count, context_length, embedding_length, feed_forward_length, attention.head_count,
attention.head_count_kv, attention.layer_norm_rms_epsilon, and attention.key_length with value_length where the config
says a head dimension (gemma2 always, granite and phi3 never). A tied model has no output.weight.

| architecture | model types | rope pairs | what is its own |
|---|---|---|---|
| llama | llama, mistral, mixtral | interleaved | rows of q and k (weights and biases) are permuted from halves; vocab_size and rope.dimension_count = d are written; no key for a window |
| llama with experts | mixtral | interleaved | expert_count, expert_used_count; per layer ffn_gate_inp and the stacks ffn_gate_exps (w1), ffn_down_exps (w2), ffn_up_exps (w3) [experts, out, in]; feed_forward_length is the experts'; weights of the chosen experts sum to 1 |
| qwen2, qwen3 | qwen2, qwen3 | halves | no rope.dimension_count, no key for a window; qwen3 has attn_q_norm and attn_k_norm |
| qwen3moe | qwen3_moe | halves | as qwen3 and mixtral's stacks; expert_feed_forward_length is the experts', feed_forward_length the dense one's; every layer has experts and their weights sum to 1: the file cannot say otherwise |
| gemma2 | gemma2 | halves | norms hold 1 + w; the embedding is stored unscaled, so the reader multiplies by sqrt(D); attention.sliding_window with layers 0, 2, … in the window; attn_logit_softcapping, final_logit_softcapping; no rope.freq_base (10000); scores are scaled by 1 / sqrt(d), but by 1 / sqrt(D / H) where there are 46 layers |
| gemma3 | gemma3_text, gemma3 | halves | norms and embedding as gemma2; q and k norms hold 1 + w too; attention.sliding_window with every 6th layer global; rope.freq_base and rope.scaling.* are of the global layers, rope.freq_base_swa of the others (10000 where an older file lacks it), which are never scaled; scores as gemma2, with 62 layers for the exception; a wrapper's text tower alone |
| phi3 | phi3 | halves | fused attn_qkv (q, k, v) and ffn_up (gate, up); rope.dimension_count is the turned part of a head; rope.scaling.original_context_length always; for longrope the tensors rope_factors_long.weight and rope_factors_short.weight [rope / 2] and rope.scaling.attn_factor, but no rope.scaling.type; attention.sliding_window is 0 for none (llama.cpp itself ignores it) |
| smollm3 | smollm3 | interleaved | permuted as llama; every 4th layer is without rope, and no key says so |
| granite | granite | interleaved | permuted as llama; attention.scale replaces 1 / sqrt(d), embedding_scale, residual_scale; logits are divided by logit_scale |
| lfm2 | lfm2 | halves | attention.head_count_kv is a list with 0 for convolution layers; shortconv.l_cache; shortconv.conv [D, l_cache], in_proj (b, c, x) and out_proj; operator_norm is attn_norm; the last norm is named token_embd_norm; feed_forward_length is the adjusted one; vocab_size |

Rope scaling, on any of them but gemma2 and phi3: `linear` and `yarn` are rope.scaling.type with rope.scaling.factor;
yarn adds rope.scaling.original_context_length, yarn_beta_fast and yarn_beta_slow where the config has them, and its
factor on cosine and sine is 0.1 ln(factor) + 1; llama3 is the tensor rope_freqs.weight [d / 2] that divides the
frequencies, and no key; dynamic is not stored.

llama.cpp itself (the build in cyllama 0.2.18) computed the vectors' logits from these files to 4e-4 and better, with
three exceptions of its own: gemma's to 2e-3, since its gelu is a float16 table; phi3's window, which it ignores; and
yarn_beta_fast and yarn_beta_slow, which it reads for a few other architectures and here as an option.
"""  # noqa: E501 — a row of a table is one line

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from family_vectors import cases, config, norm_centre, tensors

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "lfm2": gguf.MODEL_ARCH.LFM2,
}
INTERLEAVED = ("llama", "mistral", "mixtral", "smollm3", "granite")
"""Model types whose GGUF turns neighbouring dims, so that q and k rows are stored in another order."""
EXPERT_STACKS = {
    "w1": "layers.{}.feed_forward.experts.w1",
    "w2": "layers.{}.feed_forward.experts.w2",
    "w3": "layers.{}.feed_forward.experts.w3",
    "gate_proj": "model.layers.{}.mlp.experts.gate_proj",
    "down_proj": "model.layers.{}.mlp.experts.down_proj",
    "up_proj": "model.layers.{}.mlp.experts.up_proj",
}
UNSAID = {
    "gemma2": "the scale of scores is taken from the head dimension",
    "gemma3-layer-types": "every 6th layer is global, and the scale of scores is taken from the head dimension",
    "lfm2-conv-bias": "convolution layers have no biases",
    "llama-rope-dynamic-full": "dynamic scaling is not stored",
    "llama-rope-dynamic-within": "dynamic scaling is not stored",
    "llama-rope-yarn-attention-factor": "it is stored as yarn_attn_factor, which llama.cpp computes anew and ignores",
    "llama-rope-yarn-mscale": "mscale and mscale_all_dim are not stored",
    "llama-rope-yarn-no-truncate": "the correction range is always truncated",
    "mistral-window": "architecture llama has no window",
    "mixtral-window": "architecture llama has no window",
    "qwen2-window": "architecture qwen2 has no window",
    "qwen3-biases": "architecture qwen3 has no biases",
    "qwen3-moe-mixed": "every layer of qwen3moe has experts",
    "qwen3-moe-unnormed": "weights of qwen3moe's chosen experts are always normed",
    "smollm3-interval": "every 4th layer is without rope",
    "smollm3-layers": "every 4th layer is without rope",
}
"""Cases that a GGUF file cannot say, and why: its loader would compute another model."""


def gguf_cases(*model_types: str) -> list[str]:
    """Names of the cases that a GGUF file can say; only those of the given config.json model types, if any are."""
    return [case for case in cases(*model_types) if case not in UNSAID]


def write_gguf(case: str, path: Path) -> Path:
    """The case's checkpoint as one GGUF file. Returns the path; ValueError for a case that GGUF cannot say."""
    if case in UNSAID:
        raise ValueError(f"{case}: {UNSAID[case]}")
    settings = _text_settings(case)
    architecture = ARCHITECTURES[settings["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(case)
    _add_sizes(writer, settings)
    _add_rope(writer, settings)
    _add_own(writer, settings)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, values in gguf_tensors(case).items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(case: str) -> dict[str, np.ndarray]:
    """Every tensor as the file holds it: GGUF name -> float32, outermost axis first."""
    settings = _text_settings(case)
    kind, layers = settings["model_type"], settings["num_hidden_layers"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], layers)
    found: dict[str, np.ndarray] = dict(_rope_tensors(settings))
    for name, values in _stacked(_text_tensors(case), layers).items():
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise ValueError(f"{case}: the gguf package has no name for {name}")
        if kind in INTERLEAVED and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            heads = settings["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = _interleaved(values, heads)
        if name.endswith("norm.weight") and norm_centre(settings) == 0:
            values = values + np.float32(1)
        if name.endswith(".conv.conv.weight"):
            values = values[:, 0]
        found[written] = values
    return found


def _text_settings(case: str) -> dict[str, Any]:
    """The published config; of a wrapper the text tower's, with what transformers fills in where it is silent."""
    settings = config(case, published=True)
    if "text_config" not in settings:
        return settings
    filled = config(case)["text_config"]
    bases = {"rope_theta": "full_attention", "rope_local_base_freq": "sliding_attention"}
    said = {name: filled["rope_parameters"][layers]["rope_theta"] for name, layers in bases.items()}
    return {**said, **settings["text_config"]}


def _text_tensors(case: str) -> dict[str, np.ndarray]:
    """Published names without a wrapper's prefix and without its vision tower."""
    found = tensors(case)
    if "text_config" not in config(case):
        return found
    prefix = "language_model."
    return {name.removeprefix(prefix): values for name, values in found.items() if name.startswith(prefix)}


def _stacked(named: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """One tensor [experts, out, in] in place of a layer's experts."""
    experts: dict[tuple[int, str], dict[int, np.ndarray]] = {}
    rest: dict[str, np.ndarray] = {}
    for name, values in named.items():
        if ".experts." not in name:
            rest[name] = values
            continue
        parts = name.split(".")
        experts.setdefault((int(parts[2]), parts[-2]), {})[int(parts[-3])] = values
    for (layer, part), by_index in experts.items():
        stack = np.stack([by_index[index] for index in range(len(by_index))])
        rest[EXPERT_STACKS[part].format(layer) + ".weight"] = stack
    return rest


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to neighbouring pairs."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _head_dim(settings: Mapping[str, Any]) -> int:
    return int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])


def _add_sizes(writer: gguf.GGUFWriter, settings: Mapping[str, Any]) -> None:
    kind = settings["model_type"]
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_layer_norm_rms_eps(settings["norm_eps" if kind == "lfm2" else "rms_norm_eps"])
    if kind == "lfm2":
        writer.add_head_count_kv([settings["num_key_value_heads"] * attends for attends in _attending(settings)])
        writer.add_feed_forward_length(_adjusted_ffn(settings))
    else:
        writer.add_head_count_kv(settings["num_key_value_heads"])
        writer.add_feed_forward_length(settings["intermediate_size"])
    if "head_dim" in settings:
        writer.add_key_length(settings["head_dim"])
        writer.add_value_length(settings["head_dim"])
    if kind in INTERLEAVED:
        writer.add_rope_dimension_count(_head_dim(settings))
    if kind in (*INTERLEAVED, "lfm2"):
        writer.add_vocab_size(settings["vocab_size"])
    experts = settings.get("num_experts", settings.get("num_local_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(settings["num_experts_per_tok"])


def _attending(settings: Mapping[str, Any]) -> list[bool]:
    """Which layers of lfm2 attend."""
    return [kind == "full_attention" for kind in settings["layer_types"]]


def _adjusted_ffn(settings: Mapping[str, Any]) -> int:
    """F of lfm2: two thirds of what the config says, times a factor, rounded up."""
    width = int(2 * settings["block_ff_dim"] / 3)
    width = int(settings["block_ffn_dim_multiplier"] * width)
    step: int = settings["block_multiple_of"]
    return -(-width // step) * step


def _add_rope(writer: gguf.GGUFWriter, settings: Mapping[str, Any]) -> None:
    kind = settings["model_type"]
    if kind == "gemma2":
        return
    if "rope_theta" in settings:
        writer.add_rope_freq_base(settings["rope_theta"])
    if "rope_local_base_freq" in settings:
        writer.add_rope_freq_base_swa(settings["rope_local_base_freq"])
    scaling = settings.get("rope_scaling") or {}
    rule = _rule(scaling)
    if kind == "phi3":
        original, context = settings["original_max_position_embeddings"], settings["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        turned = int(settings.get("partial_rotary_factor", 1.0) * settings["hidden_size"])
        writer.add_rope_dimension_count(turned // settings["num_attention_heads"])
        if rule == "longrope":
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(context / original) / math.log(original)))
    elif rule in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rule))
        writer.add_rope_scaling_factor(scaling["factor"])
        if rule == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
            if "beta_fast" in scaling:
                writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
                writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])


def _rule(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type", scaling.get("type", "default")))


def _rope_tensors(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Frequencies that are stored: llama3's divisors, longrope's two lists."""
    scaling = settings.get("rope_scaling") or {}
    if _rule(scaling) == "longrope":
        sides = ("long", "short")
        return {f"rope_factors_{side}.weight": np.array(scaling[f"{side}_factor"], np.float32) for side in sides}
    if _rule(scaling) != "llama3":
        return {}
    dim = _head_dim(settings)
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for pair in range(dim // 2):
        turns = context / (2 * math.pi * settings["rope_theta"] ** (2 * pair / dim))
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (kept + (1 - kept) / factor))
    return {"rope_freqs.weight": np.array(divisors, np.float32)}


def _add_own(writer: gguf.GGUFWriter, settings: Mapping[str, Any]) -> None:
    """What one architecture alone has."""
    kind = settings["model_type"]
    if kind in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(settings["sliding_window"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(settings["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(settings["final_logit_softcapping"])
    elif kind == "phi3":
        writer.add_sliding_window(settings["sliding_window"] or 0)
    elif kind == "granite":
        writer.add_attention_scale(settings["attention_multiplier"])
        writer.add_embedding_scale(settings["embedding_multiplier"])
        writer.add_residual_scale(settings["residual_multiplier"])
        writer.add_logit_scale(settings["logits_scaling"])
    elif kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(settings["moe_intermediate_size"])
    elif kind == "lfm2":
        writer.add_shortconv_l_cache(settings["conv_L_cache"])
