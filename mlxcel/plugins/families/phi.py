"""Phi 3 and 4. https://arxiv.org/abs/2404.14219"""

from __future__ import annotations

from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder import DecoderFamily


class Phi3(DecoderFamily):
    """The standard block, its checkpoints with q, k and v in one tensor and gate and up in another."""

    name = "phi3"
    hf_defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    options = {"fused": True}

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        return keys.has("sliding_window")
