"""Qwen 2, Qwen 3 and its mixture of experts. https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2505.09388"""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder import DecoderFamily
from mlxcel.plugins.families.decoder_gguf import experts_from_gguf
from mlxcel.plugins.families.decoder_hf import experts_from_hf


class Qwen2(DecoderFamily):
    """The standard block with biases at q, k and v. Layers from `max_window_layers` on have the window, where it is
    switched on."""

    name = "qwen2"
    hf_defaults = {"num_key_value_heads": 32, "sliding_window": 4096}
    options = {"qkv_bias": True}

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        windowed = keys.has("sliding_window") and keys.flag("use_sliding_window", False)
        return windowed and layer >= keys.count("max_window_layers", 28)


class Qwen3(Qwen2):
    """q and k are normalised head by head before they are turned; biases are the config's."""

    name = "qwen3"
    hf_defaults = {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128}
    options = {"qk_norm": True}


class Qwen3Moe(Qwen3):
    """Qwen 3 with a mixture of experts in every `decoder_sparse_step`-th layer but the `mlp_only_layers`."""

    name = "qwen3-moe"
    hf_defaults = {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    }

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        return keys.has("sliding_window") and keys.flag("use_sliding_window", False)

    def hf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        fields = super().hf_fields(keys, checkpoint)
        step, dense = keys.size("decoder_sparse_step", 1), keys.indices("mlp_only_layers", len(fields["kinds"]))
        kinds = tuple(
            attrs.evolve(kind, experts=(layer + 1) % step == 0 and layer not in dense)
            for layer, kind in enumerate(fields["kinds"])
        )
        return {**fields, "experts": experts_from_hf(keys), "kinds": kinds}

    def gguf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        fields = super().gguf_fields(keys, checkpoint)
        kinds = tuple(
            attrs.evolve(kind, experts=f"blk.{layer}.ffn_gate_inp.weight" in checkpoint.tensors)
            for layer, kind in enumerate(fields["kinds"])
        )
        return {**fields, "experts": experts_from_gguf(keys, renormalise=True), "kinds": kinds}
