"""The forward of a launch, alone or as one program with the draw behind it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel.core.plan import CARRY
from mlxcel_jax_cuda.block_arrays import BlockWeights
from mlxcel_jax_cuda.context import JaxContext
from mlxcel_jax_cuda.drawing import DrawShape, Found, LastDrawn, drawn
from mlxcel_jax_cuda.fused_decode import by_block, forward_block, runs_fused
from mlxcel_jax_cuda.launch import Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.persistent_decode import decode_at_once, persistent_step
from mlxcel_jax_cuda.storage import Leaves
from mlxcel_jax_cuda.tiles import forward_by_tiles
from mlxcel_jax_cuda.watch import of_rows

Read = Leaves | BlockWeights
"""The weights of a model, as its index has them."""


def _forward(
    model: Model, shape: Shape, weights: Read, kv: Leaves, last_tokens: jax.Array, buffer: jax.Array
) -> tuple[Leaves, jax.Array, jax.Array | None]:
    """One launch: the KV as it leaves it, logits float32 [R, V], and where layers are watched int32 [S], the first one
    that was not finite. last_tokens int32 [slots + 1]; the launch's buffer may have more behind it."""
    whole = persistent_step(model, shape)
    if isinstance(weights, BlockWeights) and model.block is not None and whole is not None:
        return *decode_at_once(whole, model.block, shape, weights, (kv[0], kv[1]), last_tokens, buffer), None
    fields = shape.cut(buffer)
    own = jnp.broadcast_to(last_tokens[fields.slots][:, None], fields.token_ids.shape)
    token_ids = jnp.where(fields.token_ids == CARRY, own, fields.token_ids).reshape(-1)
    if isinstance(weights, BlockWeights) and by_block(model):
        return *forward_block(model, fields, token_ids, weights, kv), None
    if model.numerics.tiled:
        kv, logits, seen = forward_by_tiles(model, shape, fields, token_ids, weights, kv)
    else:
        context = JaxContext(model, fields, token_ids, weights, kv)
        logits = model.family.forward(context, model.config).astype(jnp.float32)
        kv, seen = tuple(context.kv), context.seen
    return kv, logits, None if seen is None else of_rows(seen, fields)


OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
"""What XLA is told. It does not see that a kernel writes the KV in place, and counts it once more for each layer: with
a KV of half of the memory it computed small things anew for every layer, a launch each, and gained nothing."""

forward = functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3, compiler_options=OPTIONS)(_forward)


def at_once(model: Model, shape: Shape, drawing: DrawShape) -> bool:
    """Whether forward and draw of a launch are one program. Programs then multiply, which few and small draws bear."""
    return runs_fused(model, shape) and drawing.narrow


def whole_step(
    model: Model,
    shape: Shape,
    drawing: DrawShape,
    weights: Read,
    kv: Leaves,
    last: LastDrawn,
    buffer: jax.Array,
) -> tuple[Leaves, LastDrawn, Found]:
    """The bits of `forward` and `draw` behind one another. buffer: that of the launch and then that of the draw."""
    kv, logits, _ = _forward(model, shape, weights, kv, last.tokens, buffer)
    # Nothing of the draw may be fused into what makes the logits, where they are not a kernel's.
    logits = lax.optimization_barrier(logits)  # type: ignore[no-untyped-call]
    last, found = drawn(drawing, logits, last, buffer[shape.size :])
    return kv, last, found


forward_and_draw = functools.partial(
    jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5), compiler_options=OPTIONS
)(whole_step)
