"""Llama 2 and 3, and what shares their shape. https://arxiv.org/abs/2407.21783"""

from __future__ import annotations

from functools import partial
from typing import Any

from mlxcel.plugins.families.decoder import DecoderFamily, halves_from_interleaved


class Llama(DecoderFamily):
    """Rope in halves. GGUF keeps q and k rows of this architecture in pair order: undone here."""

    name = "llama"

    def rope_transform(self, heads: int) -> dict[str, Any]:
        return {"gguf": partial(halves_from_interleaved, heads=heads)}
