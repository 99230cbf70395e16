"""The weights of a standard block by their names in checkpoints. A family that spells some otherwise says which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mlxcel.core.family import Role, WeightSchema, WeightSpec
from mlxcel.plugins.families.decoder_config import DecoderConfig

HF_NAMES = {
    "embed": "embed_tokens",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "qkv": "self_attn.qkv_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
    "mlp_post_norm": "post_feedforward_layernorm",
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{e}.gate_proj",
    "expert_up": "mlp.experts.{e}.up_proj",
    "expert_down": "mlp.experts.{e}.down_proj",
    "final_norm": "norm",
}

GGUF_NAMES = {
    "embed": "token_embd",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "qkv": "attn_qkv",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "expert_gate": "ffn_gate_exps",
    "expert_up": "ffn_up_exps",
    "expert_down": "ffn_down_exps",
    "final_norm": "output_norm",
}

Transforms = Mapping[str, Callable[[np.ndarray], np.ndarray]]


def decoder_schema(c: DecoderConfig, make: Maker, rope_transform: Callable[[int], Transforms]) -> WeightSchema:
    """All weights that the options of `c` ask for. `rope_transform(heads)` undoes what a format did to the rows of q
    and k."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attending = c.layers_where(lambda kind: kind.attends)
    dense, mixed = c.layers_where(lambda kind: not kind.experts), c.layers_where(lambda kind: kind.experts)
    weights = [make("embed", "VD", (c.vocab_size, c.hidden), "embedding", per_layer=False)]
    weights += [make("attn_norm", "D", (c.hidden,), "norm")]
    if c.fused:
        weights += make.linear("qkv", (q + 2 * kv, c.hidden), c.qkv_bias, layers=attending)
    else:
        turned, shared = rope_transform(c.heads), rope_transform(c.kv_heads)
        among: dict[str, Any] = {"group": "qkv", "layers": attending}
        weights += make.linear("q", (q, c.hidden), c.qkv_bias, transforms=turned, **among)
        weights += make.linear("k", (kv, c.hidden), c.qkv_bias, transforms=shared, **among)
        weights += make.linear("v", (kv, c.hidden), c.qkv_bias, **among)
    if c.qk_norm:
        weights += [make(name, "d", (c.head_dim,), "norm", layers=attending) for name in ("q_norm", "k_norm")]
    weights += make.linear("o", (c.hidden, q), c.output_bias, layers=attending)
    if c.post_norms:
        weights += [make("attn_post_norm", "D", (c.hidden,), "norm")]
    weights += [make("mlp_norm", "D", (c.hidden,), "norm")]
    if dense != ():
        if c.fused:
            weights += make.linear("gate_up", (2 * c.ffn, c.hidden), c.mlp_bias, layers=dense)
        else:
            weights += make.linear("gate", (c.ffn, c.hidden), c.mlp_bias, group="gate_up", layers=dense)
            weights += make.linear("up", (c.ffn, c.hidden), c.mlp_bias, group="gate_up", layers=dense)
        weights += make.linear("down", (c.hidden, c.ffn), c.mlp_bias, layers=dense)
    if c.experts is not None and mixed != ():
        e = c.experts
        weights += make.linear("router", (e.count, c.hidden), False, layers=mixed)
        weights += [
            make("expert_gate", "EFD", (e.count, e.ffn, c.hidden), "experts", layers=mixed),
            make("expert_up", "EFD", (e.count, e.ffn, c.hidden), "experts", layers=mixed),
            make("expert_down", "EDF", (e.count, c.hidden, e.ffn), "experts", layers=mixed),
        ]
    if c.post_norms:
        weights += [make("mlp_post_norm", "D", (c.hidden,), "norm")]
    weights += [make("final_norm", "D", (c.hidden,), "norm", per_layer=False)]
    head = WeightSpec(
        "unembed",
        "VD",
        (c.vocab_size, c.hidden),
        {"hf": "lm_head.weight", "gguf": "output.weight"},
        per_layer=False,
        tied_to="embed" if c.tied else None,
    )
    return WeightSchema(c.layers, (*weights, head))


class Maker:
    """Makes WeightSpecs with their names in both formats, those of `names` (by format) before the usual ones."""

    def __init__(self, names: Mapping[str, Mapping[str, str]]) -> None:
        self._hf = {**HF_NAMES, **names.get("hf", {})}
        self._gguf = {**GGUF_NAMES, **names.get("gguf", {})}

    def __call__(
        self,
        name: str,
        axes: str,
        shape: tuple[int, ...],
        role: Role,
        *,
        per_layer: bool = True,
        suffix: str = "weight",
        **options: Any,
    ) -> WeightSpec:
        """Called "name_bias" where the suffix is "bias"."""
        called = name if suffix == "weight" else f"{name}_{suffix}"
        return WeightSpec(called, axes, shape, self._names(name, suffix, per_layer), role, per_layer, **options)

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        bias: bool,
        *,
        group: str | None = None,
        layers: tuple[int, ...] | None = None,
        transforms: Transforms | None = None,
    ) -> list[WeightSpec]:
        """A weight [F, D] and, if there is one, its bias [F]."""
        options: dict[str, Any] = {"layers": layers, "transforms": transforms or {}}
        made = [self(name, "FD", shape, "linear", group=group, **options)]
        if bias:
            made.append(self(name, "F", shape[:1], "bias", suffix="bias", bias_of=name, **options))
        return made

    def _names(self, name: str, suffix: str, per_layer: bool) -> dict[str, str]:
        hf, gguf = ("model.layers.{i}.", "blk.{i}.") if per_layer else ("model.", "")
        return {"hf": f"{hf}{self._hf[name]}.{suffix}", "gguf": f"{gguf}{self._gguf[name]}.{suffix}"}


def halves_from_interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pair order (0, 1), (2, 3) … back to halves (0, d/2), (1, d/2 + 1) …

    rows: [heads * d, …] float32. GGUF stores q and k of the `llama` architecture in pair order.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
