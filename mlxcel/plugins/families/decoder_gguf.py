"""A DecoderConfig from GGUF metadata, whose keys have lost their architecture's prefix."""

from __future__ import annotations

import re
from typing import Any

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import WeightSchema
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.decoder_config import MOST_EXPERTS, Experts

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.sliding_window": (None, 0),
    "attention.sliding_window_pattern": (None,),
    "attention.scale": (None,),
    "attention.causal": (None, True),
    "attention.clamp_kqv": (None, 0),
    "attention.max_alibi_bias": (None, 0),
    "attention.kv_lora_rank": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "embedding_scale": (None, 1),
    "residual_scale": (None, 1),
    "logit_scale": (None, 1),
    "expert_count": (None, 0),
    "expert_shared_count": (None, 0),
    "leading_dense_block_count": (None, 0),
    "use_parallel_residual": (None, False),
}
"""As `decoder_hf.NEUTRAL`."""


def fields_from_gguf(keys: ConfigKeys, checkpoint: Checkpoint, *, kv_heads: int | None = None) -> dict[str, Any]:
    """What every family reads, but for the layers' kinds. `kv_heads` K is given where it is not one number there."""
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", hidden // heads if hidden % heads == 0 else None)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise keys.wrong("attention.value_length", f"the key length {head_dim}")
    return {
        "vocab_size": embedding_rows(keys, checkpoint),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.size("attention.head_count_kv", heads) if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "ffn": keys.size("feed_forward_length"),
        "norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "tied": "output.weight" not in checkpoint.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in checkpoint.tensors,
        "output_bias": "blk.0.attn_output.bias" in checkpoint.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in checkpoint.tensors,
    }


def embedding_rows(keys: ConfigKeys, checkpoint: Checkpoint) -> int:
    """V of a GGUF file, where the key is optional and the tensor is not."""
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        shown = "no tensor" if embedding is None else f"{list(embedding.shape)} as"
        raise CheckpointError(f"the GGUF file has {shown} token_embd.weight", hint="it is not a text model")
    rows = embedding.shape[0]
    if keys.size("vocab_size", rows) != rows:
        raise keys.wrong("vocab_size", f"{rows}, the rows of token_embd.weight")
    return rows


def experts_from_gguf(keys: ConfigKeys, *, renormalise: bool) -> Experts | None:
    """None where there are none. Whether shares are renormalised is the architecture's own, not the file's."""
    if not keys.count("expert_count"):
        return None
    return Experts(
        keys.size("expert_count", largest=MOST_EXPERTS),
        keys.size("expert_used_count"),
        keys.size("expert_feed_forward_length", keys.size("feed_forward_length")),
        renormalise,
    )


def refuse_unread_tensors(schema: WeightSchema, checkpoint: Checkpoint, family: str) -> None:
    """CheckpointError when a layer that is run has a tensor that `schema` does not ask for, or a weight it asks for has
    a bias that it does not: the model would run and be wrong, and GGUF metadata have no word for either.

    Layers behind the last one (draft heads), other towers and tables of angles are left alone.
    """
    wanted = schema.tensor_names(checkpoint.naming)
    for name in checkpoint.tensors:
        layer = re.match(r"blk\.(\d{1,6})\.", name)
        in_layer = layer is not None and int(layer[1]) < schema.layers and "rot_embd" not in name
        is_bias = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in wanted
        if name not in wanted and (in_layer or is_bias):
            raise CheckpointError(
                f"{checkpoint.path}: there is a tensor {name!r}, and the family {family} has no such thing",
                hint="the file is of a model that its general.architecture does not tell, or of a later kind of it",
            )
