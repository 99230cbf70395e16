"""Llama-like models: one forward for all of them. A family is a subclass that says what differs, most of it as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import Array, ForwardContext, StandardBlock, WeightSchema
from mlxcel.core.kv import FullKV, KVSpec, SlidingKV
from mlxcel.plugins.families import decoder_gguf, decoder_hf
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder_config import MOST_LAYERS, DecoderConfig, LayerKind
from mlxcel.plugins.families.decoder_weights import Maker, Transforms, decoder_schema
from mlxcel.plugins.families.rope import Rope
from mlxcel.plugins.families.rope_gguf import ropes_from_gguf
from mlxcel.plugins.families.rope_hf import FULL, SLIDING, ropes_from_hf


class DecoderFamily:
    """The standard block: h += attention(norm(h)); h += mlp(norm(h)).

    A family may fix fields of DecoderConfig (`options`), say what a config means by a key it leaves out
    (`hf_defaults`), spell tensors otherwise (`names`, by format), and read more than this class does (`hf_fields`,
    `gguf_fields`).
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    hf_defaults: ClassVar[Mapping[str, Any]] = {}
    names: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    config_class: ClassVar[type[DecoderConfig]] = DecoderConfig
    local_base: ClassVar[float | None] = None
    """rope_theta of layers with a window, in a family that turns them otherwise than the others."""

    def parse_config(self, checkpoint: Checkpoint) -> DecoderConfig:
        if checkpoint.naming == "hf":
            keys = ConfigKeys({**self.hf_defaults, **checkpoint.config}, "config.json")
            fields, neutral = self.hf_fields(keys, checkpoint), decoder_hf.NEUTRAL
        else:
            keys = ConfigKeys(checkpoint.config, "the GGUF metadata")
            fields, neutral = self.gguf_fields(keys, checkpoint), decoder_gguf.NEUTRAL
        keys.refuse_unread(neutral, self.name)
        config = self.config_class(**{**fields, **self.options})
        if checkpoint.naming == "gguf":
            decoder_gguf.refuse_unread_tensors(self.schema(config), checkpoint, self.name)
        return config

    def hf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        """Fields of DecoderConfig from config.json."""
        fields = decoder_hf.fields_from_hf(keys, checkpoint)
        windows = decoder_hf.windows_from_hf(keys, lambda layer: self.slides(keys, layer))
        kinds = [FULL if window is None else SLIDING for window in windows]
        ropes = ropes_from_hf(keys, fields["head_dim"], sorted(set(kinds)), local_base=self.local_base)
        return {**fields, **_layers(kinds, ropes, windows, keys.size("max_position_embeddings"))}

    def gguf_fields(self, keys: ConfigKeys, checkpoint: Checkpoint) -> dict[str, Any]:
        """Fields of DecoderConfig from GGUF metadata."""
        fields = decoder_gguf.fields_from_gguf(keys, checkpoint)
        layers = keys.size("block_count", largest=MOST_LAYERS)
        window = keys.count("attention.sliding_window") or None
        windows = tuple(window if self.gguf_slides(keys, layer) else None for layer in range(layers))
        kinds = [FULL if window is None else SLIDING for window in windows]
        ropes = ropes_from_gguf(keys, fields["head_dim"], checkpoint, sorted(set(kinds)), local_base=self.local_base)
        return {**fields, **_layers(kinds, ropes, windows, keys.size("context_length"))}

    def slides(self, keys: ConfigKeys, layer: int) -> bool:
        """Whether a layer has a window, by a config.json that lists no `layer_types`."""
        return False

    def gguf_slides(self, keys: ConfigKeys, layer: int) -> bool:
        """Whether a layer has a window, by GGUF metadata that has one."""
        return True

    def schema(self, config: DecoderConfig) -> WeightSchema:
        return decoder_schema(config, Maker(self.names), self.rope_transform)

    def rope_transform(self, heads: int) -> Transforms:
        """What undoes a format's own order of q and k rows, by naming; `heads` are those of the weight."""
        return {}

    def kv_spec(self, config: DecoderConfig) -> KVSpec:
        shape = config.kv_heads, config.head_dim, config.head_dim
        return KVSpec(
            tuple(FullKV(*shape) if kind.window is None else SlidingKV(*shape, kind.window) for kind in config.kinds)
        )

    def mix(self, ctx: ForwardContext, config: Any, layer: Any, x: Array) -> Array:
        """What a layer whose kind does not attend does to its normed x [T, D] instead."""
        raise NotImplementedError(f"{self.name} has layers that do not attend, and no mix")

    def eos_ids(self, config: DecoderConfig) -> frozenset[int]:
        return frozenset()

    def standard_block(self, config: DecoderConfig, context: int) -> StandardBlock | None:
        """What `forward` computes, as data; None where any option or layer departs from the standard block."""
        c, kind = config, config.kinds[0]
        if type(self).forward is not DecoderFamily.forward or set(c.kinds) != {LayerKind(kind.rope)}:
            return None
        scaled = (c.embed_scale, c.residual_scale, c.logits_divisor) != (1, 1, 1)
        capped = c.attention_softcap or c.final_softcap
        if kind.rope is None or scaled or capped or c.fused or c.post_norms or c.output_bias or c.mlp_bias:
            return None
        return StandardBlock(
            layers=c.layers,
            vocab_size=c.vocab_size,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            ffn=c.ffn,
            eps=c.norm_eps,
            norm_offset=c.norm_offset,
            qk_norm=c.qk_norm,
            qkv_bias=c.qkv_bias,
            activation=c.activation,
            scale=c.score_scale,
            frequencies=tuple(kind.rope.frequencies(context).tolist()),
            turn_scale=kind.rope.attention_factor(context),
        )

    def forward(self, ctx: ForwardContext, config: DecoderConfig) -> Array:
        c, xp = config, ctx.xp
        eps, offset = c.norm_eps, c.norm_offset
        turns = {kind.rope: kind.rope.frequencies(ctx.context) for kind in c.kinds if kind.rope is not None}

        def norm(x: Array, weight: str, layer: Any = None) -> Array:
            return ctx.rms_norm(x, weight, layer=layer, eps=eps, offset=offset)

        def attention(i: Any, x: Array, kind: LayerKind) -> Array:
            parts = ctx.project(x, "qkv", layer=i)
            sizes = (c.heads, c.kv_heads, c.kv_heads)
            if c.fused:
                parts = _split(parts[0], [size * c.head_dim for size in sizes])
            q, k, v = (xp.reshape(part, (-1, size, c.head_dim)) for part, size in zip(parts, sizes, strict=True))
            if c.qk_norm:
                q, k = norm(q, "q_norm", i), norm(k, "k_norm", i)
            if kind.rope is not None:
                turn, factor = turns[kind.rope], kind.rope.attention_factor(ctx.context)
                q, k = ctx.rope(q, turn, scale=factor), ctx.rope(k, turn, scale=factor)
            mixed = ctx.attend(q, k, v, layer=i, scale=c.score_scale, softcap=c.attention_softcap)
            return ctx.project(mixed, "o", layer=i)[0]

        def mlp(i: Any, x: Array, kind: LayerKind) -> Array:
            if kind.experts and c.experts is not None:
                (router,) = ctx.project(x, "router", layer=i)
                top_k, renormalise = c.experts.top_k, c.experts.renormalise
                return ctx.moe(x, router, layer=i, top_k=top_k, activation=c.activation, renormalise=renormalise)
            parts = ctx.project(x, "gate_up", layer=i)
            gate, up = _split(parts[0], [c.ffn, c.ffn]) if c.fused else parts
            return ctx.project(ctx.gated(gate, up, c.activation), "down", layer=i)[0]

        def layer(i: Any, h: Array, kind: LayerKind) -> Array:
            x = norm(h, "attn_norm", i)
            x = attention(i, x, kind) if kind.attends else self.mix(ctx, c, i, x)
            h = h + _scaled(norm(x, "attn_post_norm", i) if c.post_norms else x, c.residual_scale)
            x = mlp(i, norm(h, "mlp_norm", i), kind)
            return h + _scaled(norm(x, "mlp_post_norm", i) if c.post_norms else x, c.residual_scale)

        h = ctx.for_layers(layer, _scaled(ctx.embed(), c.embed_scale), c.kinds)
        logits = ctx.unembed(norm(ctx.select_rows(h), "final_norm"))
        if c.logits_divisor != 1:
            logits = logits / c.logits_divisor
        return c.final_softcap * xp.tanh(logits / c.final_softcap) if c.final_softcap else logits


def _layers(
    kinds: list[str], ropes: Mapping[str, Rope], windows: tuple[int | None, ...], positions: int
) -> dict[str, Any]:
    """`kinds` and `context` of a DecoderConfig. A window as long as the context is none."""
    context = min(rope.window(positions) for rope in ropes.values())
    windows = tuple(None if window is None or window >= context else window for window in windows)
    made = tuple(LayerKind(ropes[kind], window) for kind, window in zip(kinds, windows, strict=True))
    return {"context": context, "kinds": made}


def _split(x: Array, sizes: list[int]) -> tuple[Array, ...]:
    """x [T, sum of sizes] by its columns."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return tuple(x[:, end - size : end] for end, size in zip(ends, sizes, strict=True))


def _scaled(x: Array, factor: float) -> Array:
    return x if factor == 1 else x * factor
