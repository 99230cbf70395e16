"""Mistral and Mixtral. https://arxiv.org/abs/2310.06825, https://arxiv.org/abs/2401.04088"""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder_hf import experts_from_hf
from mlxcel.plugins.families.llama import Llama


class Mistral(Llama):
    """Llama, every layer in a window unless the config has none. Its GGUF files are of the architecture `llama`."""

    name = "mistral"
    hf_defaults = {"num_key_value_heads": 8, "sliding_window": 4096}

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        return keys.has("sliding_window")


class Mixtral(Mistral):
    """Mistral with eight MLPs a layer, of which a token goes to two."""

    name = "mixtral"
    hf_defaults = {
        "num_key_value_heads": 8,
        "sliding_window": None,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    names = {
        "hf": {
            "router": "block_sparse_moe.gate",
            "expert_gate": "block_sparse_moe.experts.{e}.w1",
            "expert_up": "block_sparse_moe.experts.{e}.w3",
            "expert_down": "block_sparse_moe.experts.{e}.w2",
        }
    }

    def hf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        fields = super().hf_fields(keys, checkpoint)
        kinds = tuple(attrs.evolve(kind, experts=True) for kind in fields["kinds"])
        return {**fields, "experts": experts_from_hf(keys), "kinds": kinds}
