"""Microseconds, bytes and operations a second of row products, beside XLA's.

    python -m mlxcel_jax_cuda.kernels.row_products_sweep

Each product is a launch of its own in a chain, over as many copies of the weight as the L2 cannot hold, the chain
repeated inside one call, so that neither the cache nor the host is timed. Medians of interleaved rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from mlxcel_jax_cuda.kernels.row_products import gated_product, row_product
from mlxcel_jax_cuda.kernels.row_products_weight import Weight

COLD_BYTES = 280e6
"""Several times the 50 MB of L2."""

EARLY = {"xla_gpu_enable_command_buffer": ""}
"""Programmatic dependent launch is lost inside captured graphs."""

WEIGHTS: Mapping[str, Mapping[str, Weight]] = {
    "llama-3.2-1b": {
        "qkv": Weight.of(3072, 2048, facing=32),
        "o": Weight.of(2048, 2048),
        "gate_up": Weight.of(16384, 2048, facing=8192),
        "down": Weight.of(2048, 8192),
        "unembed": Weight.of(128256, 2048),
    },
    "qwen3-1.7b": {
        "qkv": Weight.of(4096, 2048, facing=64),
        "gate_up": Weight.of(12288, 2048, facing=6144),
        "down": Weight.of(2048, 6144),
        "unembed": Weight.of(151936, 2048),
    },
}


@attrs.frozen
class Measured:
    """One product, or one form of it."""

    shape: str
    weight: str
    tokens: int
    form: str
    us: float
    tb_per_s: float
    tflop_per_s: float


def draw(seed: int, shape: tuple[int, ...], scale: float = 0.03) -> jax.Array:
    """bf16, normal."""
    made: jax.Array = _draw(seed, shape) * jnp.bfloat16(scale)
    return made


def _normal(seed: Any, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


_draw = jax.jit(_normal, static_argnums=1)


def timed(
    cases: Mapping[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...], int]], rounds: int = 5, calls: int = 2
) -> dict[str, float]:
    """{name: (function, arguments, launches in a call)} -> {name: median microseconds}, rounds interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, (function, arguments, count) in cases.items():
            start = time.perf_counter()
            for made in [function(*arguments) for _ in range(calls)]:
                made.block_until_ready()
            seconds[name].append((time.perf_counter() - start) / calls / count)
    return {name: statistics.median(values[1:]) * 1e6 for name, values in seconds.items()}  # the first compiles


def chain(
    function: Callable[[jax.Array, jax.Array], jax.Array], repeats: int, options: dict[str, str] | None = None
) -> Callable[..., jax.Array]:
    """function(weight, x) once for each weight, `repeats` times inside one call; each waits for the one before."""

    together: Any = lax.optimization_barrier  # a dependence that XLA cannot see through; without types

    def call(x: jax.Array, *weights: jax.Array) -> jax.Array:
        def once(_: Any, x: jax.Array) -> jax.Array:
            found, tokens = [], x
            for w in weights:
                tokens, y = together((tokens, function(w, tokens)))
                found.append(y.ravel()[0])
            fed = x.ravel().at[: len(weights)].set(jnp.stack(found).astype(x.dtype) * 0.01)
            return fed.reshape(x.shape)

        made: jax.Array = lax.fori_loop(0, repeats, once, x)
        return made

    return jax.jit(call, compiler_options=options)


def by_xla(weight: Weight) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product of a plain matrix [F, D], without the gate."""
    return lambda w, x: jnp.einsum("td,fd->tf", x, w.reshape(weight.rows, weight.depth))


def sweep(
    shapes: Mapping[str, Mapping[str, Weight]] = WEIGHTS, tokens: tuple[int, ...] = (8, 32, 64, 256, 2048)
) -> Iterator[Measured]:
    """Every weight at every T, by the kernels, by them launched early, and by XLA. bf16 results."""
    for shape, weights in shapes.items():
        for name, weight in weights.items():
            for count in tokens:
                if name == "unembed" and count > 256:
                    continue  # a prompt needs the head for its last token only
                yield from _measure(shape, name, weight, count)


def _measure(shape: str, name: str, weight: Weight, tokens: int) -> Iterator[Measured]:
    product = gated_product if name == "gate_up" else row_product
    operations = 2 * weight.rows * weight.depth * tokens
    guess = max(weight.bytes / 3e12, operations / 5e14)
    cold = math.ceil(COLD_BYTES / weight.bytes)
    copies = max(2, cold if tokens < 256 else min(cold, 6))  # many tokens: bound by arithmetic, not by a cold L2
    repeats = max(2, int(8e-3 / guess / copies))
    arguments = draw(9, (tokens, weight.depth)), *(draw(i, weight.packed_shape) for i in range(copies))

    def ours(w: jax.Array, x: jax.Array) -> jax.Array:
        return product(w, x, weight)

    forms = {"kernel": chain(ours, repeats), "xla": chain(by_xla(weight), repeats)}
    if tokens <= 32:
        forms["kernel, early"] = chain(ours, repeats, EARLY)
    times = timed({form: (function, arguments, copies * repeats) for form, function in forms.items()})
    for form, us in times.items():
        yield Measured(shape, name, tokens, form, us, weight.bytes / us / 1e6, operations / us / 1e6)


def line(found: Measured) -> str:
    return (
        f"{found.shape:12} {found.weight:8} T={found.tokens:<5} {found.form:14} {found.us:8.1f} us"
        f" {found.tb_per_s:6.2f} TB/s {found.tflop_per_s:6.0f} TFLOP/s"
    )


def main() -> None:
    for found in sweep():
        print(line(found), flush=True)


if __name__ == "__main__":
    main()
