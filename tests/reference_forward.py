"""A Llama-like forward written from the formulas: whole sequence, full mask, no cache, no tiles, any float type.

It shares no code with the package. Weights by Hugging Face names, linear weights [out, in].
"""

import math

import numpy as np


def inverse_frequencies(dim, theta, scaling=None):
    """[dim / 2]. `scaling`: llama3's four numbers, as in config.json."""
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if scaling is None:
        return np.array(plain)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    bent = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            bent.append(frequency)
        elif wavelength > original / low:
            bent.append(frequency / factor)
        else:
            mix = (original / wavelength - low) / (high - low)
            bent.append((1 - mix) * frequency / factor + mix * frequency)
    return np.array(bent)


def rotate(x, positions, frequencies):
    """x [T, H, d], halves."""
    angle = (positions.astype(np.float32)[:, None] * frequencies.astype(np.float32)).astype(x.dtype)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def forward(tensors, config, ids, *, start=0, dtype=np.float32):
    """Logits [T, V] at every position. `start` is the position of the first token."""
    w = {name: np.asarray(value, dtype) for name, value in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    eps = config.get("rms_norm_eps", 1e-6)
    scaling = config.get("rope_scaling")
    frequencies = inverse_frequencies(dim, config.get("rope_theta", 10000.0), scaling)
    positions = np.arange(start, start + len(ids))
    mask = np.tril(np.ones((len(ids), len(ids)), bool))

    def linear(x, name):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    h = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        base = f"model.layers.{i}"
        x = norm(h, w[f"{base}.input_layernorm.weight"], eps)
        q = linear(x, f"{base}.self_attn.q_proj").reshape(len(ids), heads, dim)
        k = linear(x, f"{base}.self_attn.k_proj").reshape(len(ids), kv_heads, dim)
        v = linear(x, f"{base}.self_attn.v_proj").reshape(len(ids), kv_heads, dim)
        if f"{base}.self_attn.q_norm.weight" in w:
            q = norm(q, w[f"{base}.self_attn.q_norm.weight"], eps)
            k = norm(k, w[f"{base}.self_attn.k_norm.weight"], eps)
        q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
        mixed = np.empty((len(ids), heads, dim), dtype)
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = np.where(mask, q[:, head] @ k[:, own].T / math.sqrt(dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[:, head] = weights @ v[:, own] / weights.sum(axis=-1, keepdims=True)
        h = h + linear(mixed.reshape(len(ids), -1), f"{base}.self_attn.o_proj")
        x = norm(h, w[f"{base}.post_attention_layernorm.weight"], eps)
        gate, up = linear(x, f"{base}.mlp.gate_proj"), linear(x, f"{base}.mlp.up_proj")
        h = h + linear(gate / (1 + np.exp(-gate)) * up, f"{base}.mlp.down_proj")
    h = norm(h, w["model.norm.weight"], eps)
    head = w["model.embed_tokens.weight"] if config.get("tie_word_embeddings") else w["lm_head.weight"]
    return h @ head.T
