"""Bytes that a decode step must read: weights once, and the KV of every row (docs/spec/clients.md 6.3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.core.family import WeightSchema
from mlxcel.core.kv import FullKV, KVSpec, SlidingKV
from mlxcel.footprint import ITEM_SIZES, top_k, window_token_bytes
from mlxcel.load import open_checkpoint

if TYPE_CHECKING:
    from mlxcel.core.family import ModelFamily
    from mlxcel.load import LoadedModel
    from mlxcel.plugins.manager import PluginManager
    from mlxcel.tools.model_choice import ChosenModel


@attrs.frozen
class Traffic:
    """Of one model as a backend holds it. `itemsize` is that of the compute type, `experts` how many there are and how
    many of them a token goes to."""

    weight_bytes: int
    embedding_bytes: int  # of one that is no head: a step reads a row of it for each of its rows
    hidden: int  # D
    expert_bytes: int
    experts: tuple[int, int]
    kv: KVSpec
    itemsize: int

    @classmethod
    def of(cls, family: ModelFamily, config: Any, *, weight_bytes: int, dtype: str) -> Traffic:
        schema, itemsize = family.schema(config), ITEM_SIZES[dtype]
        tied = {weight.tied_to for weight in schema.weights}
        embeddings = [weight for weight in schema.weights if weight.role == "embedding" and weight.tied_to is None]
        experts = [weight for weight in schema.weights if weight.role == "experts"]
        count = experts[0].shape[0] if experts else 0
        return cls(
            weight_bytes=weight_bytes,
            embedding_bytes=itemsize * sum(math.prod(w.shape) for w in embeddings if w.name not in tied),
            hidden=embeddings[0].shape[1] if embeddings else 0,
            expert_bytes=itemsize * _values(schema, "experts"),
            experts=(count, top_k(config) or count),
            kv=family.kv_spec(config),
            itemsize=itemsize,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one position, in all layers that keep any."""
        return self.kv.bytes_per_position(self.itemsize) + window_token_bytes(self.kv, self.itemsize)

    def step_bytes(self, rows: int, position: float) -> float:
        """Of a decode step over `rows` rows of `position` positions each."""
        return self.read_weights(rows) + rows * self.read_kv(position)

    def read_weights(self, rows: int) -> int:
        """All, but of an embedding the rows that are looked up, and of experts as many as so many rows can go to."""
        total, used = self.experts
        idle = self.expert_bytes * (total - min(total, rows * used)) // total if total else 0
        looked_up = rows * self.hidden * self.itemsize if self.embedding_bytes else 0
        return self.weight_bytes - self.embedding_bytes - idle + looked_up

    def read_kv(self, position: float) -> float:
        """Of a row of so many positions: no more of a window than it is long, and state whole."""
        total = 0.0
        for layer in self.kv.layers:
            if isinstance(layer, FullKV):
                total += position * layer.kv_heads * (layer.k_dim + layer.v_dim)
            elif isinstance(layer, SlidingKV):
                total += min(position, layer.window) * layer.kv_heads * (layer.k_dim + layer.v_dim)
            else:
                total += sum(math.prod(shape) for shape in layer.shapes)
        return total * self.itemsize


def traffic_of(chosen: ChosenModel, model: LoadedModel, manager: PluginManager) -> Traffic:
    """Of what was loaded: its config is read once more, its weights are not."""
    checkpoint = chosen.checkpoint or open_checkpoint(Path(model.facts.path), manager)
    try:
        family = manager.families().load(model.facts.family)()
        config = family.parse_config(checkpoint)
        return Traffic.of(family, config, weight_bytes=model.facts.weight_bytes, dtype=model.caps.dtype)
    finally:
        if chosen.checkpoint is None:
            checkpoint.close()


def _values(schema: WeightSchema, role: str) -> int:
    found = [weight for weight in schema.weights if weight.role == role and weight.tied_to is None]
    return sum(math.prod(weight.shape) * len(schema.layers_of(weight)) for weight in found)
