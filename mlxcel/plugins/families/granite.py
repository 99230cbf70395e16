"""Granite 3. https://github.com/ibm-granite/granite-3.0-language-models"""

from __future__ import annotations

from typing import Any

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.llama import Llama


class Granite(Llama):
    """Llama with four factors: of the embeddings, of what each half of a block adds, of the scores, of the logits."""

    name = "granite"

    def hf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            **super().hf_fields(keys, checkpoint),
            "embed_scale": keys.real("embedding_multiplier", 1.0),
            "residual_scale": keys.real("residual_multiplier", 1.0),
            "attention_scale": keys.real("attention_multiplier", 1.0),
            "logits_divisor": keys.real("logits_scaling", 1.0),
        }

    def gguf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            **super().gguf_fields(keys, checkpoint),
            "embed_scale": keys.real("embedding_scale", 1.0),
            "residual_scale": keys.real("residual_scale", 1.0),
            "attention_scale": keys.real("attention.scale") if keys.has("attention.scale") else None,
            "logits_divisor": keys.real("logit_scale", 1.0),
        }
