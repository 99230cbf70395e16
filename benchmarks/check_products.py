"""The products of every weight by the kernels themselves: a token's sums are the same whatever launch it is in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import attrs
import numpy as np
from check_engines import Checks, Rows
from random_engines import Setup

FORMULA_ERROR: Final = {"bfloat16": 4e-3, "float32": 2e-5}
"""Relative, of norms: what is rounded to bfloat16 from sums that are equal up to their order, and such sums."""
NOISE: Final = 212
"""Tokens that stand in the other places, some of them not finite: nobody may hear them."""
EXACT: Final = 8
"""Tokens whose products are compared with the formulas."""
THREADS: Final = 8
SEEDS: Final = (1, 2)


@attrs.frozen
class Companies:
    """Launches of `tokens` tokens: who stands where. `index` int32 [C, tokens] of the tokens there are, `real` bool of
    the same shape: those that are compared."""

    tokens: int
    index: np.ndarray
    real: np.ndarray


def products(checks: Checks) -> Rows:
    """All T from 1 to 300, in the launch that the engine takes for a batch and in the one for a piece of T tokens, in
    shuffled places with noise in the others, against each token alone among padding. Compared on the device, one
    program a weight; the weights of the models take turns."""
    weights = _weights(checks)
    with_programs = _compiled(checks, weights)
    for shape, name, weight, run in with_programs:
        tiles, pool, given = run.arguments
        differ, lost, error = (np.asarray(found) for found in run.call(tiles, pool, given))
        kind = "bfloat16" if name == "gate_up" else "float32"
        names = [f"{run.words[place]}" for place in np.flatnonzero(differ)]
        wrong = bool(names) or bool(lost) or float(error) > FORMULA_ERROR[kind]
        yield {
            "shape": shape, "way": name, "rows": weight.rows, "depth": weight.depth, "split": weight.split,
            "companies": len(run.words), "compared": run.compared, "error": float(error),
            "error_bound": FORMULA_ERROR[kind], "not_finite": int(lost),
            "differs": f"{len(names)}: {', '.join(names[:8])}" if names else "", "wrong": wrong,
        }  # fmt: skip


@attrs.frozen(eq=False)
class _Run:
    call: Any
    arguments: Any
    words: list[str]  # of each company
    compared: int


def _weights(checks: Checks) -> list[tuple[str, str, Any]]:
    """(model, group, weight), models in turns; those whose bits are compared come before the others. One
    that several models have is there once."""
    from mlxcel_jax_cuda.block_arrays import IN_LAYERS, Shapes
    from mlxcel_jax_cuda.kernels.row_products_weight import Weight

    sizes = checks.sizes
    if sizes.small:
        toys = {"qkv": Weight(512, 256, 1, 32), "o": Weight(256, 256, 2), "gate_up": Weight(512, 256, 1, 256)}
        return [("toy", name, weight) for name, weight in toys.items()]
    models: dict[tuple[str, Any], list[str]] = {}
    for shapes in (sizes.shapes[: sizes.bits], sizes.shapes[sizes.bits :]):
        for group in (*IN_LAYERS, "unembed"):
            for shape, _ in shapes:
                setup = Setup(shape, 1, 512)
                family: Any = setup.family
                block = family.standard_block(family.parse_config(setup.checkpoint()), setup.context)
                models.setdefault((group, getattr(Shapes.of(block), group)), []).append(shape)
    return [(", ".join(shapes), group, weight) for (group, weight), shapes in models.items()]


def companies(checks: Checks, name: str) -> list[Companies]:
    """Of the head no more tokens than an engine asks it for: those that decode, and the last of a piece."""
    sizes, most = checks.sizes, checks.sizes.companies
    rng = np.random.default_rng(most)
    by_tokens: dict[int, list[int]] = {sizes.rows[0]: [1] * most}
    for widths in (sizes.rows, sizes.tokens if name != "unembed" else ()):
        for real in range(1, most + 1):
            width = next((width for width in widths if width >= real), None)
            if width is not None:
                by_tokens.setdefault(width, []).append(real)
    return [_companies(rng, tokens, np.array(counts), most) for tokens, counts in by_tokens.items()]


def _companies(rng: np.random.Generator, tokens: int, counts: np.ndarray, most: int) -> Companies:
    shape = len(counts), tokens
    rank = np.argsort(rng.random(shape), axis=1)  # of each place: the first are real
    who = np.argsort(rng.random((len(counts), most)), axis=1)
    real, index = rank < counts[:, None], np.take_along_axis(who, np.minimum(rank, most - 1), axis=1)
    noise = most + rng.integers(NOISE, size=shape)
    return Companies(tokens, np.where(real, index, noise).astype(np.int32), real)


def _compiled(checks: Checks, weights: list[tuple[str, str, Any]]) -> Iterator[tuple[str, str, Any, _Run]]:
    """In the order of the weights, each when its program is there: they are traced one after the other, and compiled
    side by side."""
    import jax

    everything, pool = _drawn(checks, weights)
    executor = ThreadPoolExecutor(THREADS)
    waiting: deque[tuple[tuple[str, str, Any], Future[Any], tuple[Any, ...]]] = deque()

    def ready() -> Iterator[tuple[str, str, Any, _Run]]:
        of, done, rest = waiting.popleft()
        yield *of, _Run(done.result(), *rest)

    try:
        for shape, name, weight in weights:
            made = companies(checks, name)
            given = [(each.index, each.real) for each in made]
            arguments = everything[: weight.packed_shape[0]], pool[:, : weight.depth], given
            words = [f"T={count} of {each.tokens}" for each in made for count in each.real.sum(axis=1).tolist()]
            compared = sum(int(each.real.sum()) for each in made)
            lowered = jax.jit(_comparison(checks, name, weight)).lower(*arguments)
            waiting.append(((shape, name, weight), executor.submit(lowered.compile), (arguments, words, compared)))
            while waiting and waiting[0][1].done():
                yield from ready()
        while waiting:
            yield from ready()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _drawn(checks: Checks, weights: list[tuple[str, str, Any]]) -> tuple[Any, Any]:
    """Tiles enough for any of the weights, and the tokens: real ones, and noise behind them."""
    import jax.numpy as jnp

    from mlxcel_jax_cuda.kernels.row_products_sweep import draw

    most, depth = checks.sizes.companies, max(weight.depth for *_, weight in weights)
    everything = draw(SEEDS[0], (max(weight.packed_shape[0] for *_, weight in weights), 64))
    pool = np.asarray(draw(SEEDS[1], (most + NOISE, depth), 1.0).astype(jnp.float32)).copy()
    pool[most:] *= 100
    pool[most::5] = np.nan
    pool[most + 1 :: 5] = np.inf
    return everything, jnp.asarray(pool, jnp.bfloat16)


def _comparison(checks: Checks, name: str, weight: Any) -> Any:
    """tiles, tokens [M, D], [(index, real)] by launch -> differing tokens of each company int32 [C], tokens alone that
    are not finite, and the error of those against the formulas."""
    import jax.numpy as jnp
    from jax import lax

    most, least = checks.sizes.companies, checks.sizes.rows[0]
    product = launch(name, weight, checks.engines.sms)

    def compare(tiles: Any, pool: Any, given: Any) -> Any:
        def by_itself(place: Any) -> Any:
            row = lax.dynamic_slice_in_dim(pool, place, 1)
            return product(tiles, jnp.pad(row, ((0, least - 1), (0, 0))))[0]

        alone = lax.map(by_itself, jnp.arange(most))

        def differing(company: Any) -> Any:
            index, real = company
            found, wanted = product(tiles, pool[index]), alone[jnp.minimum(index, most - 1)]
            return jnp.sum((_bits(found) != _bits(wanted)).any(axis=1) & real)

        differ = jnp.concatenate([lax.map(differing, each) for each in given])
        formula = _formula(name, weight, tiles, pool[:EXACT])
        apart = jnp.linalg.norm(alone[:EXACT].astype(jnp.float32) - formula) / jnp.linalg.norm(formula)
        return differ, jnp.sum(~jnp.isfinite(alone).all(axis=1)), apart

    return compare


def _formula(name: str, weight: Any, tiles: Any, tokens: Any) -> Any:
    """The product of a few tokens in float32, without a matrix product, for which XLA would look for a kernel."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from mlxcel_jax_cuda.kernels.row_products_weight import unpack

    w = unpack(tiles, weight).astype(jnp.float32)
    sums = lax.map(lambda token: jnp.sum(w * token, axis=1), tokens.astype(jnp.float32))
    if name != "gate_up":
        return sums
    gate, up = jnp.split(sums, 2, axis=1)
    return jax.nn.silu(gate) * up


def _bits(values: Any) -> Any:
    import jax.numpy as jnp

    return values.view({2: jnp.uint16, 4: jnp.uint32}[values.dtype.itemsize])


def launch(name: str, weight: Any, sms: int) -> Any:
    """tiles, x [tokens, D] -> the product as the engine has it for so many tokens: sums in float32, or behind the gate.
    Where no kernel runs, the formulas by eight tokens at a time, which is how an engine on a CPU runs."""
    import jax.numpy as jnp
    from jax import lax

    from mlxcel_jax_cuda.kernels.row_products import gated_product, row_product
    from mlxcel_jax_cuda.numerics import TILE

    def product(tiles: Any, x: Any) -> Any:
        if name == "gate_up":
            return gated_product(tiles, x, weight, sms=sms)
        return row_product(tiles, x, weight, dtype=jnp.float32, sms=sms)

    def by_tiles(tiles: Any, x: Any) -> Any:
        parts = lax.map(lambda part: product(tiles, part), x.reshape(-1, TILE, x.shape[1]))
        return parts.reshape(len(x), -1)

    return product if sms else by_tiles
