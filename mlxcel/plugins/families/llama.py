"""Llama 2 and 3, and what shares their shape. https://arxiv.org/abs/2407.21783"""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder import DecoderFamily
from mlxcel.plugins.families.decoder_gguf import experts_from_gguf
from mlxcel.plugins.families.decoder_weights import Transforms, halves_from_interleaved


class Llama(DecoderFamily):
    """Rope in halves. GGUF keeps q and k rows of this architecture in pair order: undone here. Its files of Mistral and
    of Mixtral have this architecture too."""

    name = "llama"

    def gguf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        fields = super().gguf_fields(keys, checkpoint)
        experts = experts_from_gguf(keys, renormalise=True)
        kinds = tuple(attrs.evolve(kind, experts=experts is not None) for kind in fields["kinds"])
        return {**fields, "experts": experts, "kinds": kinds}

    def rope_transform(self, heads: int) -> Transforms:
        return {"gguf": partial(halves_from_interleaved, heads=heads)}
