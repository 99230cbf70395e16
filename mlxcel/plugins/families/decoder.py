"""Llama-like models as data: one record of shapes and options, one forward for all of them."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import Array, ForwardContext, WeightSchema, WeightSpec
from mlxcel.core.kv import FullKV, KVSpec
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.rope import Rope
from mlxcel.plugins.families.rope_gguf import rope_from_gguf
from mlxcel.plugins.families.rope_hf import rope_from_hf

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
MOST_LAYERS = 4096
"""Each layer has a dozen names, so a damaged count must not choose how many are made."""
HF_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@attrs.frozen
class DecoderConfig:
    """A pre-norm decoder with gated MLP and grouped-query attention."""

    vocab_size: int  # V
    hidden: int  # D
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    ffn: int  # F
    context: int
    norm_eps: float
    rope: Rope
    tied: bool
    activation: str = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CheckpointError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise CheckpointError(f"the head dimension {self.head_dim} must be even for rotary pairs")

    @classmethod
    def from_hf(cls, checkpoint: Checkpoint, **options: Any) -> DecoderConfig:
        """From config.json. `options` are fields that the family fixes."""
        keys = ConfigKeys(checkpoint.config, "config.json")
        hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        head_dim = keys.size("head_dim", _even_split(hidden, heads, keys))
        if keys.flag("use_sliding_window", False) and keys.has("sliding_window"):
            raise keys.wrong("use_sliding_window", "false: attention in a window is not supported")
        written = keys.word("hidden_act", (*ACTIVATIONS, *HF_ACTIVATIONS), default="silu")
        has_head = "lm_head.weight" in checkpoint.tensors
        rope = rope_from_hf(keys, head_dim)
        fields: dict[str, Any] = {
            "vocab_size": keys.size("vocab_size"),
            "hidden": hidden,
            "layers": keys.size("num_hidden_layers", largest=MOST_LAYERS),
            "heads": heads,
            "kv_heads": keys.size("num_key_value_heads", heads),
            "head_dim": head_dim,
            "ffn": keys.size("intermediate_size"),
            "context": rope.window(keys.size("max_position_embeddings")),
            "norm_eps": keys.real("rms_norm_eps", 1e-6),
            "rope": rope,
            "tied": keys.flag("tie_word_embeddings", not has_head),
            "activation": HF_ACTIVATIONS.get(written, written),
            "qkv_bias": keys.flag("attention_bias", False),
            "output_bias": keys.flag("attention_bias", False),
            "mlp_bias": keys.flag("mlp_bias", False),
        }
        return cls(**{**fields, **options})

    @classmethod
    def from_gguf(cls, checkpoint: Checkpoint, **options: Any) -> DecoderConfig:
        """From GGUF metadata with the architecture's prefix removed."""
        keys = ConfigKeys(checkpoint.config, "the GGUF metadata")
        hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
        head_dim = keys.size("attention.key_length", _even_split(hidden, heads, keys))
        if keys.size("attention.value_length", head_dim) != head_dim:
            raise keys.wrong("attention.value_length", f"the key length {head_dim}")
        context = keys.size("context_length")
        if 0 < keys.count("attention.sliding_window") < context:
            raise keys.wrong("attention.sliding_window", f"at least the context {context}: no window is supported")
        rope = rope_from_gguf(keys, head_dim, checkpoint)
        if keys.count("expert_count"):
            raise keys.wrong("expert_count", "0: mixtures of experts are not supported")
        fields: dict[str, Any] = {
            "vocab_size": _embedding_rows(keys, checkpoint),
            "hidden": hidden,
            "layers": keys.size("block_count", largest=MOST_LAYERS),
            "heads": heads,
            "kv_heads": keys.size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "ffn": keys.size("feed_forward_length"),
            "context": rope.window(context),
            "norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
            "rope": rope,
            "tied": "output.weight" not in checkpoint.tensors,
            "qkv_bias": "blk.0.attn_q.bias" in checkpoint.tensors,
            "output_bias": "blk.0.attn_output.bias" in checkpoint.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in checkpoint.tensors,
        }
        return cls(**{**fields, **options})


def _embedding_rows(keys: ConfigKeys, checkpoint: Checkpoint) -> int:
    """V of a GGUF file, where the key is optional and the tensor is not."""
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        shown = "no tensor" if embedding is None else f"{list(embedding.shape)} as"
        raise CheckpointError(f"the GGUF file has {shown} token_embd.weight", hint="it is not a text model")
    rows = embedding.shape[0]
    if keys.size("vocab_size", rows) != rows:
        raise keys.wrong("vocab_size", f"{rows}, the rows of token_embd.weight")
    return rows


def _even_split(hidden: int, heads: int, keys: ConfigKeys) -> int | None:
    """hidden / heads, where that is a whole number; else the config must say its head dimension."""
    return hidden // heads if hidden % heads == 0 else None


class DecoderFamily:
    """The standard block: h += attention(norm(h)); h += mlp(norm(h)). A subclass is data."""

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    """Fields of DecoderConfig that this family fixes."""

    def parse_config(self, checkpoint: Checkpoint) -> DecoderConfig:
        read = DecoderConfig.from_hf if checkpoint.naming == "hf" else DecoderConfig.from_gguf
        return read(checkpoint, **self.options)

    def schema(self, config: DecoderConfig) -> WeightSchema:
        c = config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        weights = [
            _outside("embed", "VD", (c.vocab_size, c.hidden), "embed_tokens", "token_embd", "embedding"),
            _norm("attn_norm", c.hidden, "input_layernorm", "attn_norm"),
            *self._linear("q", (q, c.hidden), "self_attn.q_proj", "attn_q", "qkv", c.qkv_bias, c.heads),
            *self._linear("k", (kv, c.hidden), "self_attn.k_proj", "attn_k", "qkv", c.qkv_bias, c.kv_heads),
            *self._linear("v", (kv, c.hidden), "self_attn.v_proj", "attn_v", "qkv", c.qkv_bias),
            *self._linear("o", (c.hidden, q), "self_attn.o_proj", "attn_output", None, c.output_bias),
            _norm("mlp_norm", c.hidden, "post_attention_layernorm", "ffn_norm"),
            *self._linear("gate", (c.ffn, c.hidden), "mlp.gate_proj", "ffn_gate", "gate_up", c.mlp_bias),
            *self._linear("up", (c.ffn, c.hidden), "mlp.up_proj", "ffn_up", "gate_up", c.mlp_bias),
            *self._linear("down", (c.hidden, c.ffn), "mlp.down_proj", "ffn_down", None, c.mlp_bias),
            _outside("final_norm", "D", (c.hidden,), "norm", "output_norm", "norm"),
        ]
        if c.qk_norm:
            weights.append(_norm("q_norm", c.head_dim, "self_attn.q_norm", "attn_q_norm", "d"))
            weights.append(_norm("k_norm", c.head_dim, "self_attn.k_norm", "attn_k_norm", "d"))
        head = WeightSpec(
            "unembed",
            "VD",
            (c.vocab_size, c.hidden),
            {"hf": "lm_head.weight", "gguf": "output.weight"},
            per_layer=False,
            tied_to="embed" if c.tied else None,
        )
        return WeightSchema(c.layers, (*weights, head))

    def kv_spec(self, config: DecoderConfig) -> KVSpec:
        return KVSpec((FullKV(config.kv_heads, config.head_dim, config.head_dim),) * config.layers)

    def eos_ids(self, config: DecoderConfig) -> frozenset[int]:
        return frozenset()

    def forward(self, ctx: ForwardContext, config: DecoderConfig) -> Array:
        c, xp = config, ctx.xp
        frequencies, turn = c.rope.frequencies(ctx.context), c.rope.attention_factor(ctx.context)

        def layer(i: Any, h: Array) -> Array:
            q, k, v = ctx.project(ctx.rms_norm(h, "attn_norm", layer=i, eps=c.norm_eps), "qkv", layer=i)
            q = xp.reshape(q, (-1, c.heads, c.head_dim))
            k = xp.reshape(k, (-1, c.kv_heads, c.head_dim))
            v = xp.reshape(v, (-1, c.kv_heads, c.head_dim))
            if c.qk_norm:
                q = ctx.rms_norm(q, "q_norm", layer=i, eps=c.norm_eps)
                k = ctx.rms_norm(k, "k_norm", layer=i, eps=c.norm_eps)
            q, k = ctx.rope(q, frequencies, scale=turn), ctx.rope(k, frequencies, scale=turn)
            mixed = ctx.attend(q, k, v, layer=i, scale=c.head_dim**-0.5)
            h = h + ctx.project(mixed, "o", layer=i)[0]
            gate, up = ctx.project(ctx.rms_norm(h, "mlp_norm", layer=i, eps=c.norm_eps), "gate_up", layer=i)
            return h + ctx.project(ctx.gated(gate, up, c.activation), "down", layer=i)[0]

        h = ctx.for_layers(layer, ctx.embed())
        return ctx.unembed(ctx.rms_norm(ctx.select_rows(h), "final_norm", eps=c.norm_eps))

    def rope_transform(self, heads: int) -> dict[str, Any]:
        """What undoes a format's own order of q and k rows, by naming; `heads` are those of the weight."""
        return {}

    def _linear(
        self,
        name: str,
        shape: tuple[int, int],
        hf: str,
        gguf: str,
        group: str | None,
        bias: bool,
        rope_heads: int = 0,
    ) -> tuple[WeightSpec, ...]:
        transforms = self.rope_transform(rope_heads) if rope_heads else {}
        names = {"hf": f"model.layers.{{i}}.{hf}", "gguf": f"blk.{{i}}.{gguf}"}
        weight = WeightSpec(
            name,
            "FD",
            shape,
            {naming: f"{pattern}.weight" for naming, pattern in names.items()},
            group=group,
            transforms=transforms,
        )
        if not bias:
            return (weight,)
        return weight, WeightSpec(
            f"{name}_bias",
            "F",
            shape[:1],
            {naming: f"{pattern}.bias" for naming, pattern in names.items()},
            "bias",
            bias_of=name,
            transforms=transforms,
        )


def _norm(name: str, size: int, hf: str, gguf: str, axes: str = "D") -> WeightSpec:
    names = {"hf": f"model.layers.{{i}}.{hf}.weight", "gguf": f"blk.{{i}}.{gguf}.weight"}
    return WeightSpec(name, axes, (size,), names, "norm")


def _outside(name: str, axes: str, shape: tuple[int, ...], hf: str, gguf: str, role: Any) -> WeightSpec:
    names = {"hf": f"model.{hf}.weight", "gguf": f"{gguf}.weight"}
    return WeightSpec(name, axes, shape, names, role, per_layer=False)


def halves_from_interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pair order (0, 1), (2, 3) … back to halves (0, d/2), (1, d/2 + 1) …

    rows: [heads * d, …] float32. GGUF stores q and k of the `llama` architecture in pair order.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
