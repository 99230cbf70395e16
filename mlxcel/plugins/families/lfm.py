"""LFM 2: short gated convolutions along the row, and attention in some layers. https://arxiv.org/abs/2511.23404"""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import Array, ForwardContext, WeightSchema
from mlxcel.core.kv import KVSpec, RecurrentKV
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder import DecoderFamily
from mlxcel.plugins.families.decoder_config import MOST_LAYERS, DecoderConfig, LayerKind
from mlxcel.plugins.families.decoder_gguf import fields_from_gguf
from mlxcel.plugins.families.decoder_weights import Maker
from mlxcel.plugins.families.rope_gguf import rope_from_gguf
from mlxcel.plugins.families.rope_hf import FULL, rope_from_hf

CONV = "conv"
LONGEST_KERNEL = 64


@attrs.frozen
class Lfm2Config(DecoderConfig):
    """A convolution sees `kernel` positions; a row keeps the last kernel - 1 of its inputs as state."""

    kernel: int = 3
    conv_bias: bool = False


class Lfm2(DecoderFamily):
    """The standard block with q/k norms; in layers that do not attend, x is projected to b, c and u, and
    y_t = c_t * sum over j of w_j * (b * u)_(t - kernel + 1 + j)."""

    name = "lfm2"
    config_class = Lfm2Config
    options = {"qk_norm": True}
    hf_defaults = {"rope_theta": 1e6, "num_key_value_heads": 8, "tie_word_embeddings": True}
    names = {
        "hf": {
            "attn_norm": "operator_norm",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
            "o": "self_attn.out_proj",
            "mlp_norm": "ffn_norm",
            "gate": "feed_forward.w1",
            "up": "feed_forward.w3",
            "down": "feed_forward.w2",
            "final_norm": "embedding_norm",
            "conv_in": "conv.in_proj",
            "kernel": "conv.conv",
            "conv_out": "conv.out_proj",
        },
        "gguf": {
            "final_norm": "token_embd_norm",
            "conv_in": "shortconv.in_proj",
            "kernel": "shortconv.conv",
            "conv_out": "shortconv.out_proj",
        },
    }

    def hf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        layers = keys.size("num_hidden_layers", largest=MOST_LAYERS)
        if keys.has("layer_types"):
            attends = [kind == FULL for kind in keys.words("layer_types", (FULL, CONV), layers)]
        else:
            full = keys.indices("full_attn_idxs", layers) if keys.has("full_attn_idxs") else range(layers)
            attends = [layer in full for layer in range(layers)]
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        head_dim = keys.size("head_dim", hidden // heads if hidden % heads == 0 else None)
        tied = "tie_embedding" if keys.has("tie_embedding") else "tie_word_embeddings"
        rope = rope_from_hf(keys, head_dim)
        return {
            "vocab_size": keys.size("vocab_size"),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": keys.size("num_key_value_heads", heads),
            "head_dim": head_dim,
            "ffn": _adjusted_ffn(keys),
            "context": rope.window(keys.size("max_position_embeddings")),
            "norm_eps": keys.real("norm_eps", 1e-5),
            "tied": keys.flag(tied, True),
            "kinds": tuple(LayerKind(rope, attends=attending) for attending in attends),
            "kernel": keys.size("conv_L_cache", 3, largest=LONGEST_KERNEL),
            "conv_bias": keys.flag("conv_bias", False),
        }

    def gguf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        kv_heads = keys.counts("attention.head_count_kv", keys.size("block_count", largest=MOST_LAYERS))
        shared = sorted({*kv_heads} - {0}) or [keys.size("attention.head_count")]
        if len(shared) > 1:
            raise keys.wrong("attention.head_count_kv", "one number for all layers that attend, 0 for the others")
        fields = fields_from_gguf(keys, checkpoint, kv_heads=shared[0])
        rope = rope_from_gguf(keys, fields["head_dim"], checkpoint)
        return {
            **fields,
            "context": rope.window(keys.size("context_length")),
            "kinds": tuple(LayerKind(rope, attends=count > 0) for count in kv_heads),
            "kernel": keys.size("shortconv.l_cache", largest=LONGEST_KERNEL),
        }

    def schema(self, config: Any) -> WeightSchema:
        schema, make, hidden = super().schema(config), Maker(self.names), config.hidden
        convs = config.layers_where(lambda kind: not kind.attends)
        if convs == ():
            return schema
        own = [
            *make.linear("conv_in", (3 * hidden, hidden), config.conv_bias, layers=convs),
            make("kernel", "DK", (hidden, config.kernel), "array", layers=convs),
            *make.linear("conv_out", (hidden, hidden), config.conv_bias, layers=convs),
        ]
        if config.conv_bias:
            own.append(make("kernel", "D", (hidden,), "array", suffix="bias", layers=convs))
        return attrs.evolve(schema, weights=(*schema.weights, *own))

    def kv_spec(self, config: Any) -> KVSpec:
        state = RecurrentKV(((config.kernel - 1, config.hidden),))
        full = super().kv_spec(config).layers
        return KVSpec(tuple(kv if kind.attends else state for kv, kind in zip(full, config.kinds, strict=True)))

    def mix(self, ctx: ForwardContext, config: Any, layer: Any, x: Array) -> Array:
        xp, hidden = ctx.xp, config.hidden
        (projected,) = ctx.project(x, "conv_in", layer=layer)
        b, c, u = (projected[:, place * hidden : (place + 1) * hidden] for place in range(3))
        kernel = ctx.weight("kernel", layer=layer)
        bias = ctx.weight("kernel_bias", layer=layer) if config.conv_bias else None

        def step(state: tuple[Array, ...], values: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
            seen = xp.concat([state[0], values[0][None]])  # [kernel, D], oldest first
            y = seen[0] * kernel[:, 0]
            for place in range(1, config.kernel):
                y = y + seen[place] * kernel[:, place]
            return (seen[1:],), y if bias is None else y + bias

        y = ctx.state_scan(step, (b * u,), layer=layer)
        return ctx.project(c * y, "conv_out", layer=layer)[0]


def _adjusted_ffn(keys: ConfigKeys) -> int:
    """F, which the config gives before two thirds of it are rounded up to a multiple."""
    size = keys.size("block_ff_dim" if keys.has("block_ff_dim") else "intermediate_size")
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = keys.size("block_multiple_of", 256)
    adjusted = int(keys.real("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-adjusted // multiple) * multiple
