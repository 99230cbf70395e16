"""A seeded Llama-family checkpoint of a few kilobytes, written as a safetensors folder or as GGUF.

Both writers build the very same weights and the same byte-level tokenizer from the same arguments, so that a test can
compare one reader with the other, or vary one field of a file and look at what changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import numpy as np

BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, IM_START, IM_END)  # ids 0 to 3; the 256 bytes follow, then one token a merge

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

FIRST_MERGES = (
    *("Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s"),
    *("a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o", "Ġ m", "Ġo f"),
    *("Ġ in", "Ġ d", "Ġ h", "Ġan d", "i c", "Ġ l", "l e", "Ġ n", "o m"),
)


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for the bytes 0 to 255 in GPT-2 vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tiny_vocabulary(tokenizer_size: int = 300) -> tuple[list[str], list[str]]:
    """Tokens in id order, and merges as "left right": specials, bytes, then the fixed merges and pairs of letters."""
    wanted = tokenizer_size - len(SPECIALS) - 256
    merges = list(FIRST_MERGES)
    made = {merge.replace(" ", "") for merge in merges}
    merges += [f"{a} {b}" for a, b in product(ascii_lowercase, repeat=2) if a + b not in made]
    if not 0 <= wanted <= len(merges):
        raise ValueError(f"tokenizer_size={tokenizer_size} must be {tokenizer_size - wanted} to {260 + len(merges)}")
    merges = merges[:wanted]
    return [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)], merges


def tiny_tokenizer_json(tokenizer_size: int = 300, *, add_bos: bool = False) -> dict[str, Any]:
    """tokenizer.json of the byte-level tokenizer, as data."""
    tokens, merges = tiny_vocabulary(tokenizer_size)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for index, token in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": template if add_bos else None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tiny_config(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 320,
    tie: bool = True,
    dtype: str = "F32",
) -> dict[str, Any]:
    """config.json, as data."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype],
    }
    return config if head_dim is None else {**config, "head_dim": head_dim}


def tiny_weights(
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 320,
    tie: bool = True,
) -> dict[str, np.ndarray]:
    """float32 weights under their Hugging Face names; matrices are [out, in], of variance 1/in."""
    rng = np.random.default_rng(seed)
    d = head_dim or hidden // heads

    def matrix(rows: int, columns: int) -> np.ndarray:
        values: np.ndarray = rng.standard_normal((rows, columns)) / np.sqrt(columns)
        return values.astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab, hidden)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(heads * d, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * d, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * d, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads * d),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.mlp.gate_proj.weight": matrix(ffn, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(ffn, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, ffn),
        }
    weights["model.norm.weight"] = norm()
    return weights if tie else {**weights, "lm_head.weight": matrix(vocab, hidden)}


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16, rounded to nearest even. Finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> Path:
    """One shard, from the format's definition. `dtype` is F32, F16 or BF16 and holds for all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name, values in tensors.items():
        if dtype == "BF16":
            parts.append(bfloat16_bits(values).tobytes())
        else:
            parts.append(values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 320,
    tokenizer_size: int = 300,
    tie: bool = True,
    config_overrides: Mapping[str, Any] | None = None,
    dtype: str = "F32",
    shards: int = 1,
    add_bos: bool = False,
) -> Path:
    """A folder as Hugging Face would hold it. Several shards come with their index. Returns the folder.

    `config_overrides` are put over config.json; a value of None removes the field.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape: dict[str, Any] = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "ffn": ffn, "vocab": vocab, "tie": tie,
    }  # fmt: skip
    config = {**tiny_config(**shape, dtype=dtype), **(config_overrides or {})}
    removed = {name for name, value in (config_overrides or {}).items() if value is None}
    write_json(folder / "config.json", {name: value for name, value in config.items() if name not in removed})
    write_json(folder / "tokenizer.json", tiny_tokenizer_json(tokenizer_size, add_bos=add_bos))
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [1, 3], "do_sample": False})
    roles = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHATML}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})
    weights = tiny_weights(seed=seed, **shape)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights, dtype)
        return folder
    names = list(weights)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        write_safetensors(folder / file, {name: weights[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.size for values in weights.values()) * (4 if dtype == "F32" else 2)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return folder


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor's Hugging Face name."""
    if not name.startswith("model.layers."):
        return GGUF_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[rest]}"


def interleave_rope_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * d, D] from (first half, second half) to interleaved pairs, as GGUF `llama` holds them."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 320,
    tokenizer_size: int = 300,
    tie: bool = True,
    dtype: str = "F32",
    add_bos: bool = False,
    pre: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """The model of `write_tiny_llama` as one GGUF file, by the gguf package. Returns the path.

    `dtype` (F32, F16, BF16, Q8_0, Q4_0, Q4_1) holds for the matrices; norms stay F32. `metadata` adds string, bool and
    uint32 keys.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    d = head_dim or hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_rope_dimension_count(d)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    tokens, merges = tiny_vocabulary(tokenizer_size)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIALS else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHATML)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    kind = gguf.GGMLQuantizationType[dtype]
    shape: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "tie": tie}
    for name, values in tiny_weights(seed=seed, head_dim=head_dim, ffn=ffn, vocab=vocab, **shape).items():
        if name.endswith("q_proj.weight"):
            values = interleave_rope_rows(values, heads)
        elif name.endswith("k_proj.weight"):
            values = interleave_rope_rows(values, kv_heads)
        if values.ndim == 1 or dtype == "F32":
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
