"""GPT-NeoX: attention and MLP side by side on one residual. https://arxiv.org/abs/2204.06745"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import Array, ForwardContext, WeightSchema, WeightSpec
from mlxcel.core.kv import FullKV, KVSpec
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import ConfigKeys

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu"}
"""`hidden_act` of config.json -> the name that ForwardContext knows."""


@attrs.frozen
class GPTNeoXConfig:
    """Sizes by their axis letters, and the options that GPT-NeoX checkpoints use."""

    vocab_size: int  # V
    hidden: int  # D
    layers: int  # L
    heads: int  # H
    ffn: int  # F
    context: int
    norm_eps: float
    rotary_dim: int  # the first dims of a head that positions turn
    rotary_base: float
    activation: str
    parallel: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def frequencies(self) -> np.ndarray:
        """float32 [rotary_dim / 2], radians a position. https://arxiv.org/abs/2104.09864"""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        return (1.0 / self.rotary_base**exponents).astype(np.float32)


class GPTNeoX:
    """h + attention(norm1(h)) + mlp(norm2(h)); without `use_parallel_residual` one after the other."""

    name = "gpt-neox"

    def parse_config(self, checkpoint: Checkpoint) -> GPTNeoXConfig:
        keys = ConfigKeys(checkpoint.config, "config.json")
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        if hidden % heads:
            raise CheckpointError(f"config.json: hidden_size {hidden} does not divide into {heads} heads")
        if keys.flag("tie_word_embeddings", False) or not keys.flag("attention_bias", True):
            raise CheckpointError("config.json: tied embeddings and attention without biases are not supported")
        for unread in ("rope_scaling", "rope_parameters"):
            if keys.has(unread):
                raise keys.wrong(unread, "null: only rotary_pct and rotary_emb_base are read")
        share = keys.real("rotary_pct", 0.25)
        rotary_dim = int(hidden // heads * share)
        if share > 1 or rotary_dim < 2 or rotary_dim % 2:
            raise CheckpointError(
                f"config.json: rotary_pct {share:g} of a head of {hidden // heads} is {rotary_dim} dims: it must be an "
                f"even number from 2 to {hidden // heads}"
            )
        return GPTNeoXConfig(
            vocab_size=keys.size("vocab_size"),
            hidden=hidden,
            layers=keys.size("num_hidden_layers"),
            heads=heads,
            ffn=keys.size("intermediate_size"),
            context=keys.size("max_position_embeddings"),
            norm_eps=keys.real("layer_norm_eps", 1e-5),
            rotary_dim=rotary_dim,
            rotary_base=keys.real("rotary_emb_base", 10000.0),
            activation=ACTIVATIONS[keys.word("hidden_act", tuple(ACTIVATIONS), default="gelu")],
            parallel=keys.flag("use_parallel_residual", True),
        )

    def schema(self, config: GPTNeoXConfig) -> WeightSchema:
        c, layer = config, "gpt_neox.layers.{i}"
        weights = (
            _outside("embed", "VD", (c.vocab_size, c.hidden), "gpt_neox.embed_in.weight", role="embedding"),
            *_norm("attn_norm", c.hidden, f"{layer}.input_layernorm"),
            *_linear("qkv", (3 * c.hidden, c.hidden), f"{layer}.attention.query_key_value"),
            *_linear("o", (c.hidden, c.hidden), f"{layer}.attention.dense"),
            *_norm("mlp_norm", c.hidden, f"{layer}.post_attention_layernorm"),
            *_linear("up", (c.ffn, c.hidden), f"{layer}.mlp.dense_h_to_4h"),
            *_linear("down", (c.hidden, c.ffn), f"{layer}.mlp.dense_4h_to_h"),
            _outside("final_norm", "D", (c.hidden,), "gpt_neox.final_layer_norm.weight", role="norm"),
            _outside("final_norm_bias", "D", (c.hidden,), "gpt_neox.final_layer_norm.bias", role="bias"),
            _outside("unembed", "VD", (c.vocab_size, c.hidden), "embed_out.weight", role="linear"),
        )
        return WeightSchema(c.layers, weights)

    def kv_spec(self, config: GPTNeoXConfig) -> KVSpec:
        return KVSpec((FullKV(config.heads, config.head_dim, config.head_dim),) * config.layers)

    def eos_ids(self, config: GPTNeoXConfig) -> frozenset[int]:
        return frozenset()

    def forward(self, ctx: ForwardContext, config: GPTNeoXConfig) -> Array:
        c, frequencies = config, config.frequencies()

        def attention(i: Any, x: Array) -> Array:
            (qkv,) = ctx.project(x, "qkv", layer=i)
            # Rows of the fused weight go head by head: q, k and v of head 0, then those of head 1.
            heads = ctx.xp.reshape(qkv, (-1, c.heads, 3, c.head_dim))
            q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
            q, k = ctx.rope(q, frequencies), ctx.rope(k, frequencies)
            return ctx.project(ctx.attend(q, k, v, layer=i, scale=c.head_dim**-0.5), "o", layer=i)[0]

        def mlp(i: Any, h: Array) -> Array:
            x = ctx.layer_norm(h, "mlp_norm", "mlp_norm_bias", layer=i, eps=c.norm_eps)
            return ctx.project(ctx.activate(ctx.project(x, "up", layer=i)[0], c.activation), "down", layer=i)[0]

        def layer(i: Any, h: Array) -> Array:
            attended = h + attention(i, ctx.layer_norm(h, "attn_norm", "attn_norm_bias", layer=i, eps=c.norm_eps))
            return attended + mlp(i, h if c.parallel else attended)

        h = ctx.select_rows(ctx.for_layers(layer, ctx.embed()))
        return ctx.unembed(ctx.layer_norm(h, "final_norm", "final_norm_bias", eps=c.norm_eps))


def _linear(name: str, shape: tuple[int, int], tensor: str) -> tuple[WeightSpec, WeightSpec]:
    bias = WeightSpec(f"{name}_bias", "F", shape[:1], {"hf": f"{tensor}.bias"}, "bias", bias_of=name)
    return WeightSpec(name, "FD", shape, {"hf": f"{tensor}.weight"}), bias


def _norm(name: str, size: int, tensor: str) -> tuple[WeightSpec, WeightSpec]:
    bias = WeightSpec(f"{name}_bias", "D", (size,), {"hf": f"{tensor}.bias"}, "bias")
    return WeightSpec(name, "D", (size,), {"hf": f"{tensor}.weight"}, "norm"), bias


def _outside(name: str, axes: str, shape: tuple[int, ...], tensor: str, *, role: Any) -> WeightSpec:
    return WeightSpec(name, axes, shape, {"hf": tensor}, role, per_layer=False)
