"""What a model takes, by its shapes alone: parameters, bytes of weights, of KV, and of one step's own arrays."""

from __future__ import annotations

import math
from typing import Any, Final

import attrs

from mlxcel.core.family import ModelFamily, WeightSchema, WeightSpec
from mlxcel.core.kv import FullKV, KVSpec, RecurrentKV, SlidingKV

ITEM_SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by the compute type."""

STREAMS: Final = 4
"""Arrays [T, D] that live at once in a layer: h, its normed copy, what the norm multiplies, and the sum to come."""
PRODUCTS: Final = 2.5
"""Arrays [T, F] of fused weights: their product and its contiguous parts; or gate, up and what the dearest of the
activations, gelu by tanh, has at once beside them: three halves."""
SCORES: Final = 3
"""Arrays [H, N] of the one token that attends: its products, them scaled, and their exponentials."""
LOGITS: Final = 4
"""Arrays [R, V] of the unembedding and of the sampler's stages."""

SCORED: Final = 64
"""Tokens that a launch on a device scores at once, each with V logits."""
LISTS: Final = 7
"""Arrays [SCORED, V] of two steps of which neither is read: logits, all ids and all log-probabilities of each, and one
that the draw has beside them."""
PARTS: Final = 2 * 4096 * 8
"""Sums [K, d + 2] of attention that kernels of a decode hold, in float32: of eight columns of each of the most parts
that rows are cut into, and twice, since one layer's are read while the next one's are written."""


@attrs.frozen
class Footprint:
    """Sizes of a model. Values are counted, and bytes are those of a compute type."""

    vocab: int  # V
    hidden: int  # D
    heads: int  # H
    widest: int  # largest F of the products of a layer that are computed together
    parameters: int  # a weight that is tied to another is that one
    active: int  # those that one token meets: of the experts only its own
    staged: int  # most values of weights that are read together: a fused group, the embedding, all experts of a layer
    window: int  # positions the model was made for
    kv: KVSpec

    @classmethod
    def of(cls, family: ModelFamily, config: Any) -> Footprint:
        """By the family's schema and KV spec. A config that has no `heads`, or no `experts.top_k`, is taken to have a
        query head for each KV head, and to use every expert."""
        schema, kv = family.schema(config), family.kv_spec(config)
        return cls(
            vocab=config.vocab_size,
            hidden=next((weight.shape[1] for weight in schema.weights if weight.role == "embedding"), 0),
            heads=getattr(config, "heads", None) or max(map(_kv_heads, kv.layers), default=0),
            widest=_widest(schema),
            parameters=sum(_values(schema, weight) for weight in schema.weights),
            active=sum(_active(schema, weight, top_k(config)) for weight in schema.weights),
            staged=_staged(schema),
            window=config.context,
            kv=kv,
        )

    def weight_bytes(self, dtype: str) -> int:
        """Of the weights as they are computed with."""
        return self.parameters * ITEM_SIZES[dtype]

    def workspace_bytes(self, dtype: str, *, context: int, chunk: int, rows: int) -> int:
        """Of the arrays of the largest step, beside weights and KV.

        T = max(min(chunk, N), rows) tokens run through a layer at once: T * (STREAMS * D + PRODUCTS * F) values of the
        compute type, F being the widest. A token at a time attends to at most N positions: SCORES * H * N float32.
        R = rows of logits: LOGITS * R * V float32.
        """
        tokens = max(min(chunk, context), rows)
        values = tokens * (STREAMS * self.hidden + PRODUCTS * self.widest)
        return int(values) * ITEM_SIZES[dtype] + 4 * (SCORES * self.heads * context + LOGITS * rows * self.vocab)

    @property
    def runtime_bytes(self) -> int:
        """What a device's runtime needs beside weights, workspace and KV, whatever a step is asked for.

        Either of two: the gap that the largest weights leave, which pass through the device in float32; or the arrays
        that a step has whatever its tokens are, which then lie in such a gap: LISTS * SCORED * V values of scores and
        PARTS * K * (d + 2) of attention, in float32.
        """
        kept = [layer for layer in self.kv.layers if not isinstance(layer, RecurrentKV)]
        sums = max((layer.kv_heads * (layer.v_dim + 2) for layer in kept), default=0)
        return 4 * max(self.staged, LISTS * SCORED * self.vocab + PARTS * sums)


def window_token_bytes(kv: KVSpec, itemsize: int) -> int:
    """Bytes of one token in all rings, K and V: what it takes until the windows have moved past it."""
    rings = [layer for layer in kv.layers if isinstance(layer, SlidingKV)]
    return itemsize * sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in rings)


def only(kv: KVSpec, kind: type[FullKV | SlidingKV | RecurrentKV]) -> KVSpec:
    """The layers of one kind, to ask for their bytes alone."""
    return KVSpec(tuple(layer for layer in kv.layers if isinstance(layer, kind)))


def top_k(config: Any) -> int | None:
    """Experts that a token goes to; None where the config does not say."""
    found: int | None = getattr(getattr(config, "experts", None), "top_k", None)
    return found


def _kv_heads(layer: FullKV | SlidingKV | RecurrentKV) -> int:
    return 0 if isinstance(layer, RecurrentKV) else layer.kv_heads


def _values(schema: WeightSchema, weight: WeightSpec) -> int:
    return 0 if weight.tied_to is not None else math.prod(weight.shape) * len(schema.layers_of(weight))


def _active(schema: WeightSchema, weight: WeightSpec, top_k: int | None) -> int:
    values = _values(schema, weight)
    if weight.role != "experts" or top_k is None:
        return values
    return values // weight.shape[0] * min(top_k, weight.shape[0])


def _widest(schema: WeightSchema) -> int:
    """F of the widest group of linear weights, or of one expert's products together."""
    groups: dict[str, int] = {}
    for weight in schema.weights:
        if weight.per_layer and weight.role == "linear":
            group = weight.group or weight.name
            groups[group] = groups.get(group, 0) + weight.shape[0]
        elif weight.role == "experts":
            groups["experts"] = groups.get("experts", 0) + weight.shape[1]
    return max(groups.values(), default=0)


def _staged(schema: WeightSchema) -> int:
    """Values of the largest weight of a layer or outside, or of a fused group of them."""
    groups: dict[str, int] = {}
    for weight in schema.weights:
        if weight.tied_to is None:
            name = weight.group or weight.name if weight.role == "linear" else weight.name
            groups[name] = groups.get(name, 0) + math.prod(weight.shape)
    return max(groups.values(), default=0)
