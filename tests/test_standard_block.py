"""The standard block: which models say that they are one, and the decode forward of fused steps against NumPy."""

import attrs
import family_vectors
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlxcel.core.source import NoProgress
from mlxcel.plugins.builtin import mlxcel_families
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.qwen import Qwen2, Qwen3
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.family_run import LoadedFamily
from mlxcel.testing.random_checkpoint import SHAPES, random_checkpoint
from mlxcel_jax_cuda.block_arrays import Shapes, refusal
from mlxcel_jax_cuda.block_loading import BlockLoading
from mlxcel_jax_cuda.standard_block import Wanted, decode
from mlxcel_jax_cuda.standard_steps import PlainSteps
from mlxcel_reference_numpy.weights import load_weights

TOLERANCE = 2e-5
"""Of the largest logit: float32 sums in another order, and the norm's division behind a product instead of before."""

PAGE_SIZE, ROWS = 16, 8
SMALL = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": (Llama, {"model_type": "llama"}),
    "llama, untied": (Llama, {"model_type": "llama", "tie_word_embeddings": False}),
    "llama, stretched": (Llama, {"model_type": "llama", "rope_scaling": YARN}),
    "qwen2": (Qwen2, {"model_type": "qwen2"}),
    "qwen3": (Qwen3, {"model_type": "qwen3", "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
}
LENGTHS = (21, 1, 17)
PLACES = {0: 2, 7: 0, 3: 1}
"""Tokens of three rows, and which of them is at a place among eight; the others are padding."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in ("llama, untied", "qwen3") else pytest.mark.slow) for n in MODELS],
)
def model(request):
    family, overrides = MODELS[request.param]
    return family(), random_checkpoint(family(), {**SMALL, **overrides}, seed=3)


def packed_weights(family, checkpoint, block):
    """BlockWeights in float32 of what the NumPy backend reads."""
    config = family.parse_config(checkpoint)
    read = load_weights(family.schema(config), checkpoint, NoProgress())
    loading = BlockLoading(block, tied=config.tied, dtype=jnp.float32, device=jax.devices("cpu")[0])
    for (name, layer), linear in read.linear.items():
        if not (name == "unembed" and config.tied):
            loading.put(name, layer, linear.matrix)
        if linear.bias is not None:
            loading.put(f"{name}_bias", layer, linear.bias)
    for (name, layer), values in read.plain.items():
        if name == "embed" or "norm" in name:
            loading.put(name, layer, values)
    return Shapes.of(block), loading.done()


def attend_pages(block, page_tables, lengths):
    """Attention by its formula over each row's own pages, of a row that is padding anything finite."""

    def attend(q, pools, layer):
        keys, values = (pool.reshape(block.layers, -1, *pool.shape[1:])[layer] for pool in pools)
        group = block.heads // block.kv_heads
        q = q[:, :, :group].reshape(len(q), block.heads, block.head_dim)
        k, v = (jnp.swapaxes(pool[page_tables], 1, 2) for pool in (keys, values))  # [N, K, P, page_size, d]
        k, v = (jnp.repeat(x.reshape(*x.shape[:2], -1, x.shape[-1]), group, axis=1) for x in (k, v))
        scores = jnp.einsum("nhd,nhpd->nhp", q, k, precision="highest") * block.scale
        visible = jnp.arange(k.shape[2]) < jnp.maximum(lengths, 1)[:, None, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        return jnp.einsum("nhp,nhpd->nhd", weights, v, precision="highest").reshape(len(q), -1)

    return attend


def test_fused_steps_give_the_logits_of_numpy(model):
    """Every token of three rows of different lengths among eight, pages in shuffled places, from position 0 on."""
    family, checkpoint = model
    config = family.parse_config(checkpoint)
    block = family.standard_block(config, config.context)
    shapes, weights = packed_weights(family, checkpoint, block)
    rng = np.random.default_rng(11)
    rows = [rng.integers(0, block.vocab_size, length) for length in LENGTHS]
    loaded = LoadedFamily.load(family, checkpoint)
    expected = [loaded.logits(ids) for ids in rows]
    pages = -(-max(LENGTHS) // PAGE_SIZE)
    tables = np.full((ROWS, pages), -1, np.int32)
    numbers = rng.permutation(ROWS * pages + 1)[: ROWS * pages].reshape(ROWS, pages)
    for place in PLACES:
        tables[place] = numbers[place]
    count = ROWS * pages + 1
    shape = (block.layers * count, block.kv_heads, PAGE_SIZE, block.head_dim)
    pools = tuple(jnp.zeros(shape, jnp.float32) for _ in range(2))

    @jax.jit
    def step(pools, ids, positions):
        attend = attend_pages(block, jnp.maximum(tables, 0), positions + 1)
        return decode(block, shapes, PlainSteps(), weights, pools, ids, positions, jnp.asarray(tables), attend)

    for position in range(max(LENGTHS)):
        live = {place: row for place, row in PLACES.items() if position < LENGTHS[row]}
        ids, positions = np.zeros(ROWS, np.int32), np.full(ROWS, -1, np.int32)
        for place, row in live.items():
            ids[place], positions[place] = rows[row][position], position
        pools, logits = step(pools, ids, positions)
        assert np.isfinite(logits).all()
        for place, row in live.items():
            wanted = expected[row][position]
            np.testing.assert_allclose(logits[place], wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
    used = {page for place, row in PLACES.items() for page in numbers[place][: -(-LENGTHS[row] // PAGE_SIZE)]}
    untouched = [page for page in range(count) if page not in used]
    by_layer = [np.asarray(pool).reshape(block.layers, count, -1) for pool in pools]
    assert all(not pages[:, untouched].any() for pages in by_layer), "padding was written to a page"
    assert all(pages[layer, page].any() for pages in by_layer for layer in range(block.layers) for page in used)


@attrs.frozen
class Counting(PlainSteps):
    """Notes how many tokens each layer's gate has."""

    tokens: list[int] = attrs.field(factory=list)

    def gated(self, shapes, weights, layer, carried, eps):
        self.tokens.append(len(carried.scaled))
        return super().gated(shapes, weights, layer, carried, eps)


def test_behind_the_last_layers_keys_only_tokens_that_are_wanted_go_on():
    """Their logits, and every token's keys, are what they are where all go on."""
    family, overrides = MODELS["llama"]
    checkpoint = random_checkpoint(family(), {**SMALL, **overrides}, seed=3)
    block = family().standard_block(family().parse_config(checkpoint), 128)
    shapes, weights = packed_weights(family(), checkpoint, block)
    rng, wanted = np.random.default_rng(5), jnp.array([6, 1])
    ids, positions = jnp.asarray(rng.integers(0, block.vocab_size, ROWS)), jnp.arange(ROWS, dtype=jnp.int32)
    tables = jnp.zeros((ROWS, 1), jnp.int32)
    shape = (block.layers, block.kv_heads, PAGE_SIZE, block.head_dim)

    def run(chosen):
        pools, all_steps = tuple(jnp.zeros(shape, jnp.float32) for _ in range(2)), Counting()
        attend = attend_pages(block, tables, positions + 1)
        given = (weights, pools, ids, positions, tables, attend)
        return *decode(block, shapes, all_steps, *given, chosen), all_steps.tokens

    last = Counting()
    pools, logits, gated = run(Wanted(wanted, last, attend_pages(block, tables[wanted], positions[wanted] + 1)))
    expected_pools, expected, everywhere = run(Wanted(wanted))
    assert (everywhere, gated, last.tokens) == ([ROWS] * 3, [ROWS] * 2, [len(wanted)])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    for found, all_of_them in zip(pools, expected_pools, strict=True):
        np.testing.assert_array_equal(found, all_of_them)


STANDARD = {
    *("llama-rope-dynamic-full", "llama-rope-dynamic-within", "llama-rope-linear", "llama-rope-llama3"),
    *("llama-rope-llama3-short", "llama-rope-yarn", "llama-rope-yarn-attention-factor", "llama-rope-yarn-betas"),
    *("llama-rope-yarn-mscale", "llama-rope-yarn-no-truncate", "llama-rope-yarn-one-mscale", "llama-untied"),
    *("mistral-null-window", "qwen2-biases", "qwen3", "qwen3-yarn"),
}
"""The cases whose models depart from the standard block in nothing."""


@pytest.mark.parametrize("case", family_vectors.cases())
def test_a_family_says_where_it_is_the_standard_block(tmp_path, case):
    """With biases elsewhere, windows, experts, caps, norms behind, scales or layers that are not turned it is none."""
    checkpoint = SafetensorsCheckpoint(family_vectors.write_checkpoint(case, tmp_path))
    (spec,) = [spec for spec in mlxcel_families() if spec.claims(checkpoint.naming, checkpoint.architecture)]
    family = spec.load()()
    config = family.parse_config(checkpoint)
    block = family.standard_block(config, config.context)
    assert (block is not None) == (case in STANDARD), block
    if block is not None:
        assert hash(block) == hash(family.standard_block(config, config.context)), (
            "a static argument has to be hashable"
        )
        assert (block.hidden, block.heads, block.qkv_bias) == (config.hidden, config.heads, config.qkv_bias)


def test_a_family_with_a_forward_of_its_own_is_no_standard_block(model):
    family, checkpoint = model
    config = family.parse_config(checkpoint)

    class Other(type(family)):
        def forward(self, ctx, config):
            return super().forward(ctx, config) * 2

    assert Other().standard_block(config, config.context) is None


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_have_a_fused_form(name):
    family = {"llama": Llama, "qwen3": Qwen3}[SHAPES[name]["model_type"]]()
    config = family.parse_config(random_checkpoint(family, SHAPES[name]))
    block = family.standard_block(config, 8192)
    assert refusal(block) is None
    shapes = Shapes.of(block)
    assert shapes.gate_up.facing == config.ffn
    assert shapes.qkv.facing * 2 == config.head_dim


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "gelu_tanh"}, "activation is gelu_tanh"),
        ({"head_dim": 80, "frequencies": (1.0,) * 40}, "80 dims"),
        ({"frequencies": (1.0,) * 16}, "only 32 of 64 dims"),
        ({"kv_heads": 1}, "1 KV heads do not fill tiles of 2"),
        ({"heads": 6}, "6 heads of 2 KV heads"),
        ({"qk_norm": True}, "normed share a tile"),
        ({"hidden": 576}, "576"),
        ({"ffn": 1600}, "1600"),
        ({"vocab_size": 50257}, "unembed [50257, 256]"),
    ],
)
def test_a_block_that_the_kernels_do_not_know_is_refused_with_the_reason(change, words):
    family, config = Llama(), Llama().parse_config(random_checkpoint(Llama(), {**SMALL, "model_type": "llama"}))
    block = attrs.evolve(family.standard_block(config, 128), **change)
    assert words in refusal(block)
    with pytest.raises(ValueError, match="no fused form"):
        Shapes.of(block)
