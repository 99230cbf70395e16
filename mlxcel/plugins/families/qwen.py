"""Qwen3: q and k are normalised head by head before they are turned. https://arxiv.org/abs/2505.09388"""

from __future__ import annotations

from typing import Any, ClassVar

from mlxcel.plugins.families.decoder import DecoderFamily


class Qwen3(DecoderFamily):
    """The standard block with q/k norms."""

    name = "qwen3"
    options: ClassVar[dict[str, Any]] = {"qk_norm": True}
