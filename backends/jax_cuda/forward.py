"""The two jitted functions of a step: the forward of a launch, and the draw behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.plan import CARRY, SamplingArrays
from mlxcel.core.sampling import Carry, Sampler
from mlxcel_jax_cuda.context import JaxContext
from mlxcel_jax_cuda.fused_decode import decode_fused, runs_fused
from mlxcel_jax_cuda.launch import Shape, unpack
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.standard_block import BlockWeights, Launching
from mlxcel_jax_cuda.storage import Leaves
from mlxcel_jax_cuda.tiles import forward_by_tiles


class Arrays(NamedTuple):
    """The weights of a model, as the two kinds of forward read them."""

    leaves: Leaves
    block: BlockWeights | None = None


def _forward(
    model: Model, shape: Shape, weights: Arrays, kv: Leaves, last_tokens: jax.Array, buffer: jax.Array
) -> tuple[Leaves, jax.Array]:
    """One launch: the KV as it leaves it, and logits float32 [R, V]. last_tokens int32 [slots + 1]."""
    fields = unpack(shape, buffer)
    own = jnp.broadcast_to(last_tokens[fields.slots][:, None], fields.token_ids.shape)
    token_ids = jnp.where(fields.token_ids == CARRY, own, fields.token_ids).reshape(-1)
    if weights.block is not None and runs_fused(model, shape):
        return decode_fused(model, fields, token_ids, weights.block, kv)
    if model.numerics.tiled:
        return forward_by_tiles(model, shape, fields, token_ids, weights.leaves, kv)
    context = JaxContext(model, fields, token_ids, weights.leaves, kv)
    logits = model.family.forward(context, model.config)
    return tuple(context.kv), logits.astype(jnp.float32)


_STATIC, _DONATED = (0, 1), 3
_captured = jax.jit(_forward, static_argnums=_STATIC, donate_argnums=_DONATED)
_early = jax.jit(
    _forward, static_argnums=_STATIC, donate_argnums=_DONATED, compiler_options=Launching().compiler_options
)


def forward_of(model: Model, shape: Shape) -> Callable[..., tuple[Leaves, jax.Array]]:
    """`_forward` as it is compiled for a launch: of fused kernels each may begin while the one before it ends."""
    return _early if model.early and runs_fused(model, shape) else _captured


@attrs.frozen(cache_hash=True)
class DrawShape:
    """Static side of a draw: the sampler, its stages, and the arrays that the host buffer is cut into."""

    sampler: Sampler
    rows: int  # R
    stages: tuple[str, ...]
    top_logprobs: int | None
    params: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape behind R

    @classmethod
    def of(cls, sampler: Sampler, sampling: SamplingArrays, rows: int) -> DrawShape:
        params = tuple((name, array.dtype.name, array.shape[1:]) for name, array in sorted(sampling.params.items()))
        return cls(sampler, rows, sampling.stages, sampling.top_logprobs, params)


class LastDrawn(NamedTuple):
    """The device's own newest draw of each slot; the last entry is for rows that have no slot."""

    tokens: jax.Array  # int32 [slots + 1]
    observed: jax.Array  # float32 [slots + 1]


class Found(NamedTuple):
    """What the host reads of a draw."""

    words: jax.Array  # int32 [2, R]: tokens, status
    logprobs: jax.Array | None  # float32 [R]
    top_ids: jax.Array | None  # int32 [R, n]
    top_logprobs: jax.Array | None  # float32 [R, n]
    observed: jax.Array | None  # float32 [R]


def pack_draw(shape: DrawShape, slots: np.ndarray, sampling: SamplingArrays) -> np.ndarray:
    """One int32 buffer of the slots [R] and every array of a draw, in the order of `shape.params`."""
    parts = [slots.astype(np.int32)]
    for name, _, _ in shape.params:
        array = np.ascontiguousarray(sampling.params[name])
        if array.dtype == np.bool_:
            array = array.astype(np.int32)
        parts.append(array.view(np.int32).reshape(-1))
    return np.concatenate(parts)


def _unpack_draw(shape: DrawShape, buffer: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    slots, start = buffer[: shape.rows], shape.rows
    params: dict[str, jax.Array] = {}
    for name, dtype, behind in shape.params:
        size = (shape.rows, *behind)
        length = int(np.prod(size))
        words = buffer[start : start + length].reshape(size)
        start += length
        is_bool = dtype == "bool"
        params[name] = words != 0 if is_bool else jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return slots, params


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def draw(shape: DrawShape, logits: jax.Array, last: LastDrawn, buffer: jax.Array) -> tuple[LastDrawn, Found]:
    """The sampler over logits [R, V], and what it drew as the carry of each slot."""
    slots, params = _unpack_draw(shape, buffer)
    carry = Carry(last.tokens[slots], last.observed[slots])
    sampling = SamplingArrays(shape.stages, params, shape.top_logprobs)
    drawn: Any = shape.sampler.draw(jnp, logits, sampling, carry)
    observed = last.observed
    if drawn.observed is not None:
        observed = observed.at[slots].set(drawn.observed)
    found = Found(
        jnp.stack([drawn.tokens, drawn.status.astype(jnp.int32)]),
        drawn.logprobs,
        drawn.top_ids,
        drawn.top_logprobs,
        drawn.observed,
    )
    return LastDrawn(last.tokens.at[slots].set(drawn.tokens), observed), found
