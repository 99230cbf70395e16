"""A random GPT-NeoX checkpoint of a few kilobytes, and its logits from the formulas, in plain NumPy float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def neox_config(**changes: Any) -> dict[str, Any]:
    """config.json, as data: D = 32, H = 4, d = 8 of which 4 are turned, L = 2."""
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "gelu",
        "rotary_pct": 0.5,
        "rotary_emb_base": 10000,
        "max_position_embeddings": 256,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        **changes,
    }


def neox_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors under their Hugging Face names, biases random as well."""
    rng = np.random.default_rng(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]

    def linear(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
        return {
            f"{name}.weight": rng.standard_normal((rows, columns)) / math.sqrt(columns),
            f"{name}.bias": 0.3 * rng.standard_normal(rows),
        }

    def norm(name: str) -> dict[str, np.ndarray]:
        return {
            f"{name}.weight": 1 + 0.2 * rng.standard_normal(hidden),
            f"{name}.bias": 0.2 * rng.standard_normal(hidden),
        }

    weights = {
        "gpt_neox.embed_in.weight": rng.standard_normal((vocab, hidden)),
        "embed_out.weight": rng.standard_normal((vocab, hidden)) / math.sqrt(hidden),
        **norm("gpt_neox.final_layer_norm"),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{index}"
        weights |= norm(f"{layer}.input_layernorm") | norm(f"{layer}.post_attention_layernorm")
        weights |= linear(f"{layer}.attention.query_key_value", 3 * hidden, hidden)
        weights |= linear(f"{layer}.attention.dense", hidden, hidden)
        weights |= linear(f"{layer}.mlp.dense_h_to_4h", ffn, hidden)
        weights |= linear(f"{layer}.mlp.dense_4h_to_h", hidden, ffn)
    return {name: values.astype(np.float32) for name, values in weights.items()}


def write_neox(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """config.json and model.safetensors; `changes` are keys of config.json. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = neox_config(**changes)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(neox_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def neox_logits(config: dict[str, Any], weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits float64 [T, V] of token ids [T], one position and one head at a time."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    dim = config["hidden_size"] // heads
    turned = int(dim * config["rotary_pct"])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return (x - x.mean()) / math.sqrt(x.var() + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return np.array([value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x])

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for i in range(turned // 2):
            angle = position * config["rotary_emb_base"] ** (-2 * i / turned)
            a, b = x[i], x[i + turned // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + turned // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    stream = [w["gpt_neox.embed_in.weight"][token] for token in ids]
    for index in range(config["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{index}"
        queries, keys, values = [], [], []
        for position, h in enumerate(stream):
            fused = linear(norm(h, f"{layer}.input_layernorm"), f"{layer}.attention.query_key_value")
            each = [fused[head * 3 * dim : (head + 1) * 3 * dim] for head in range(heads)]
            queries.append([rotate(part[:dim], position) for part in each])
            keys.append([rotate(part[dim : 2 * dim], position) for part in each])
            values.append([part[2 * dim :] for part in each])
        after = []
        for position, h in enumerate(stream):
            mixed = []
            for head in range(heads):
                scores = [queries[position][head] @ keys[t][head] / math.sqrt(dim) for t in range(position + 1)]
                shares = np.exp(np.array(scores) - max(scores))
                mixed.append(sum(s * values[t][head] for t, s in enumerate(shares / shares.sum())))
            attended = h + linear(np.concatenate(mixed), f"{layer}.attention.dense")
            source = h if config["use_parallel_residual"] else attended
            inner = linear(norm(source, f"{layer}.post_attention_layernorm"), f"{layer}.mlp.dense_h_to_4h")
            after.append(attended + linear(gelu(inner), f"{layer}.mlp.dense_4h_to_h"))
        stream = after
    return np.array([w["embed_out.weight"] @ norm(h, "gpt_neox.final_layer_norm") for h in stream])
