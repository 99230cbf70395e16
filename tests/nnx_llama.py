"""A Llama layer stack in flax.nnx, for the tests alone: another library's products, norms and softmax."""

import jax
import jax.numpy as jnp
from flax import nnx


def linear(weight, rngs):
    layer = nnx.Linear(weight.shape[1], weight.shape[0], use_bias=False, precision="highest", rngs=rngs)
    layer.kernel[...] = jnp.asarray(weight).T
    return layer


def norm(weight, eps, rngs):
    layer = nnx.RMSNorm(len(weight), epsilon=eps, rngs=rngs)
    layer.scale[...] = jnp.asarray(weight)
    return layer


class Layer(nnx.Module):
    def __init__(self, tensors, base, config, rngs):
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        self.q, self.k, self.v, self.o = (linear(tensors[f"{base}.{name}.weight"], rngs) for name in names)
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        self.gate, self.up, self.down = (linear(tensors[f"{base}.{name}.weight"], rngs) for name in names)
        eps = config["rms_norm_eps"]
        self.before_attention = norm(tensors[f"{base}.input_layernorm.weight"], eps, rngs)
        self.before_mlp = norm(tensors[f"{base}.post_attention_layernorm.weight"], eps, rngs)
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def __call__(self, h, turn):
        x = self.before_attention(h)
        tokens = h.shape[0]
        q = turn(self.q(x).reshape(1, tokens, self.heads, -1))
        k = turn(self.k(x).reshape(1, tokens, self.kv_heads, -1))
        v = self.v(x).reshape(1, tokens, self.kv_heads, -1)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + self.o(mixed.reshape(tokens, -1))
        x = self.before_mlp(h)
        return h + self.down(nnx.silu(self.gate(x)) * self.up(x))


def forward(tensors, config, ids):
    """Logits [T, V] of the positions 0 … T - 1."""
    rngs = nnx.Rngs(0)
    h = jnp.asarray(tensors["model.embed_tokens.weight"])[jnp.asarray(ids)]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = config.get("rope_theta", 10000.0) ** (-jnp.arange(0, dim, 2) / dim)
    angle = jnp.arange(len(ids))[:, None, None] * frequencies

    def turn(x):
        pairs = jax.lax.complex(*jnp.split(x, 2, axis=-1)) * jnp.exp(1j * angle)
        return jnp.concatenate([pairs.real, pairs.imag], axis=-1)

    for i in range(config["num_hidden_layers"]):
        h = Layer(tensors, f"model.layers.{i}", config, rngs)(h, turn)
    h = norm(tensors["model.norm.weight"], config["rms_norm_eps"], rngs)(h)
    head = tensors["model.embed_tokens.weight"] if config["tie_word_embeddings"] else tensors["lm_head.weight"]
    return h @ jnp.asarray(head).T
