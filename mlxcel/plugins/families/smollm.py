"""SmolLM 3. https://huggingface.co/blog/smollm3"""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.llama import Llama


class SmolLM3(Llama):
    """Llama whose every fourth layer turns nothing; only these have a window, where it is switched on."""

    name = "smollm3"
    hf_defaults = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}

    def hf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        fields = super().hf_fields(keys, checkpoint)
        kinds = tuple(
            kind if self._turns(keys, layer) else attrs.evolve(kind, rope=None)
            for layer, kind in enumerate(fields["kinds"])
        )
        return {**fields, "kinds": kinds}

    def gguf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        fields = super().gguf_fields(keys, checkpoint)
        kinds = tuple(
            attrs.evolve(kind, rope=None) if (layer + 1) % 4 == 0 else kind
            for layer, kind in enumerate(fields["kinds"])
        )
        return {**fields, "kinds": kinds}

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        windowed = keys.has("sliding_window") and keys.flag("use_sliding_window", False)
        return windowed and not self._turns(keys, layer)

    def _turns(self, keys: ConfigKeys, layer: int) -> bool:
        if keys.has("no_rope_layers"):
            layers = keys.size("num_hidden_layers")
            return keys.flags("no_rope_layers", layers)[layer]
        return (layer + 1) % keys.size("no_rope_layer_interval", 4) != 0
