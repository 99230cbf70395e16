"""Spec design 1, R2: a family may hand in arrays of any memory order; a row's bits do not follow from it."""

import numpy as np
import pytest
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.plan import SamplingArrays, StepPlan
from mlxcel.core.source import NoProgress
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel_reference_numpy.context import NumpyContext
from mlxcel_reference_numpy.storage import Pages
from mlxcel_reference_numpy.weights import load_weights

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE = 60, 4, 2, 22, 128


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"), hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
    )
    checkpoint, family = SafetensorsCheckpoint(folder), Llama()
    return load_weights(family.schema(family.parse_config(checkpoint)), checkpoint, NoProgress())


def context(weights, tokens):
    """A step of one row at positions 0 … tokens - 1."""
    ids = np.arange(tokens, dtype=np.int32)
    one = np.zeros(1, np.int32)
    plan = StepPlan(
        token_ids=ids,
        positions=ids,
        query_start=np.array([0, tokens], np.int32),
        seq_lens=np.array([tokens], np.int32),
        page_tables=np.zeros((1, 1), np.int32),
        slots=one,
        state_copies=one,
        sequence_ids=np.ones(1, np.int64),
        logits_rows=one,
        draw_rows=one,
        sampling=SamplingArrays((), {}),
    )
    shape = (1, KV_HEADS, PAGE, HEAD_DIM)
    return NumpyContext(plan, ids, weights, [Pages(np.zeros(shape, np.float32), np.zeros(shape, np.float32))], PAGE)


def heads(x, count):
    return x.reshape(len(x), -1)[:, : count * HEAD_DIM].reshape(len(x), count, HEAD_DIM)


OPS = {
    "rms_norm": lambda ctx, x, order: ctx.rms_norm(order(x), "attn_norm", layer=0, eps=1e-5),
    "layer_norm": lambda ctx, x, order: ctx.layer_norm(order(x), "attn_norm", None, layer=0, eps=1e-5),
    "project": lambda ctx, x, order: ctx.project(order(x), "qkv", layer=0)[0],
    "unembed": lambda ctx, x, order: ctx.unembed(order(x)),
    "attend": lambda ctx, x, order: ctx.attend(
        order(heads(np.tile(x, 2), HEADS)),
        order(heads(x, KV_HEADS)),
        order(heads(x, KV_HEADS)),
        layer=0,
        scale=0.2,
    ),
    "gated": lambda ctx, x, order: ctx.gated(order(x), order(x), "silu"),
    "rope": lambda ctx, x, order: ctx.rope(
        order(heads(x, KV_HEADS)), np.geomspace(1, 1e-4, HEAD_DIM // 2).astype(np.float32)
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_a_token_the_same_bits_in_any_memory_order(weights, name):
    """NumPy adds along memory: one token in Fortran order is contiguous, two are not."""
    x = np.random.default_rng(7).standard_normal((9, HIDDEN)).astype(np.float32)
    op = OPS[name]
    plain = op(context(weights, 9), x, np.ascontiguousarray)
    for tokens in range(1, 10):
        turned = op(context(weights, tokens), x[:tokens], np.asfortranarray)
        assert np.ascontiguousarray(turned).tobytes() == plain[:tokens].tobytes(), f"{tokens} tokens"
