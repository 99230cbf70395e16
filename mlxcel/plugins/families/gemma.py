"""Gemma 2 and 3. https://arxiv.org/abs/2408.00118, https://arxiv.org/abs/2503.19786"""

from __future__ import annotations

from typing import Any

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder import DecoderFamily


class Gemma2(DecoderFamily):
    """Norms before and behind attention and MLP, embeddings scaled by sqrt(D), soft-caps, a window in every other
    layer.

    Norm weights are stored without the 1 that is added to them, but in GGUF with it.
    """

    name = "gemma2"
    hf_defaults = {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    names = {"hf": {"mlp_norm": "pre_feedforward_layernorm"}}
    options = {"activation": "gelu_tanh", "post_norms": True}
    full_every = 2
    """Of so many layers the last one sees everything."""
    scaled_by_width = 46
    """Layers of the one size whose scores are scaled by D / H instead of the head dimension; GGUF does not say so."""

    def hf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        keys.word("hidden_activation", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
        fields = super().hf_fields(keys, checkpoint)
        return {
            **fields,
            "norm_offset": 1.0,
            "embed_scale": fields["hidden"] ** 0.5,
            "attention_scale": keys.real("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": _cap(keys, "attn_logit_softcapping"),
            "final_softcap": _cap(keys, "final_logit_softcapping"),
        }

    def gguf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        fields = super().gguf_fields(keys, checkpoint)
        by_width = len(fields["kinds"]) == self.scaled_by_width
        return {
            **fields,
            "embed_scale": fields["hidden"] ** 0.5,
            "attention_scale": (fields["hidden"] / fields["heads"]) ** -0.5 if by_width else None,
            "attention_softcap": _cap(keys, "attn_logit_softcapping"),
            "final_softcap": _cap(keys, "final_logit_softcapping"),
        }

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        return keys.has("sliding_window") and (layer + 1) % self.full_every != 0

    def gguf_slides(self, keys: ConfigKeys, layer: int) -> bool:
        return (layer + 1) % self.full_every != 0


class Gemma3(Gemma2):
    """q and k normed head by head instead of soft-caps, a window in five of six layers, and in those another rope."""

    name = "gemma3"
    hf_defaults = {
        **Gemma2.hf_defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
    }
    options = {**Gemma2.options, "qk_norm": True}
    local_base = 10000.0
    full_every = 6
    scaled_by_width = 62

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        every = keys.size("sliding_window_pattern", keys.size("_sliding_window_pattern", self.full_every))
        return keys.has("sliding_window") and (layer + 1) % every != 0


def _cap(keys: ConfigKeys, key: str) -> float:
    return keys.real(key) if keys.has(key) else 0.0
