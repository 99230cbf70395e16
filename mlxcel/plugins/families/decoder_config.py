"""Llama-like models as data: one frozen record of shapes and options."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.rope import Rope

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
MOST_LAYERS = 4096
"""Each layer has a dozen names, so a damaged count must not choose how many are made."""
MOST_EXPERTS = 4096


@attrs.frozen
class LayerKind:
    """How a layer may differ from others. Without a rope its positions are not turned; without a window it sees all."""

    rope: Rope | None
    window: int | None = None
    attends: bool = True  # else its family's own `mix` takes the place of attention
    experts: bool = False  # its MLP is a mixture


@attrs.frozen
class Experts:
    """A mixture of gated MLPs: `count` E, of which a token goes to `top_k`, each of width `ffn` F."""

    count: int
    top_k: int
    ffn: int
    renormalise: bool

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count:
            raise CheckpointError(f"{self.top_k} experts a token cannot be chosen of {self.count}")


@attrs.frozen
class DecoderConfig:
    """A decoder of pre-normed blocks with grouped-query attention and a gated MLP."""

    vocab_size: int  # V
    hidden: int  # D
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    ffn: int  # F
    context: int
    norm_eps: float
    tied: bool
    kinds: tuple[LayerKind, ...]  # one a layer
    experts: Experts | None = None
    activation: str = "silu"
    fused: bool = False  # the checkpoint has q, k and v in one tensor, gate and up in another
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # q and k normed head by head before they are turned
    post_norms: bool = False  # what attention and the MLP add is normed too
    norm_offset: float = 0.0  # added to the weights of every norm
    attention_scale: float | None = None  # of the scores; head_dim ** -0.5 without one
    attention_softcap: float = 0.0  # 0 caps nothing
    final_softcap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise CheckpointError(f"the head dimension {self.head_dim} must be even for rotary pairs")

    @property
    def layers(self) -> int:
        """L."""
        return len(self.kinds)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def layers_where(self, fits: Callable[[LayerKind], bool]) -> tuple[int, ...] | None:
        """The layers whose kind fits; None when all do."""
        found = tuple(i for i, kind in enumerate(self.kinds) if fits(kind))
        return None if len(found) == self.layers else found
