"""Why a GPU runs a model op by op, for people."""

from __future__ import annotations

from mlxcel_jax_cuda.block_arrays import refusal
from mlxcel_jax_cuda.model import Model


def remark(model: Model) -> str | None:
    """One line for whoever starts this model on a GPU; None where it runs by the kernels, and where somebody asked for
    layers to be looked at, which they do not show."""
    numerics = model.numerics
    if numerics.platform != "cuda" or numerics.watched or model.block is not None:
        return None
    return f"no kernels for the layers of this model: {_reason(model)}; XLA runs them op by op, which is slower"


def _reason(model: Model) -> str:
    if not model.numerics.packed:
        dtype = model.numerics.dtype
        other = "this GPU is another" if dtype == "bfloat16" else f"this runs in {dtype}"
        return f"they are for Hopper GPUs in bfloat16, and {other}"
    describe = getattr(model.family, "standard_block", None)
    described = None if describe is None else describe(model.config, model.layout.context)
    if described is None:
        return "they know a standard block alone, and its family or config departs from that"
    return refusal(described) or "they are not used here"
