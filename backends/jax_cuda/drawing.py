"""The draw of a launch: the sampler, traced over the launch's logits, and the one host buffer that it reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.sampling import Carry, Sampler
from mlxcel_jax_cuda.fingerprint import NotPlain, class_name
from mlxcel_jax_cuda.kernels.sizes import FEW_IDS

_BOOL: Final = np.dtype(np.bool_).str
_INT32: Final = np.dtype(np.int32).str

ENDS: Final = "ends"
"""The array of the ends that rows ignore, int32 [R, 8], -1 for none."""


@attrs.frozen(cache_hash=True)
class DrawShape:
    """Static side of a draw: the sampler, its stages, and the arrays that the host buffer is cut into."""

    sampler: Sampler
    rows: int  # R
    stages: tuple[str, ...]
    top_logprobs: int | None
    params: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype.str, shape behind R

    @classmethod
    def of(cls, sampler: Sampler, sampling: SamplingArrays, rows: int) -> DrawShape:
        params = tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(sampling.params.items()))
        return cls(sampler, rows, sampling.stages, sampling.top_logprobs, params)

    @property
    def words(self) -> str:
        """For people."""
        listed = "" if self.top_logprobs is None else f", {self.top_logprobs} log-probabilities"
        return f"draw, rows={self.rows}: {' '.join(self.stages)}{listed}"

    @property
    def largest_of(self) -> int | None:
        """Where a row's draw is the id of its largest logit and nothing else: among so many first ids, but the `ENDS`
        that it ignores. Else None."""
        kind, sampler = _who_draws(type(self.sampler)), self.sampler
        own = set(self.params) <= {(ENDS, _INT32, (FEW_IDS,))}
        if kind is None or "largest_of" not in vars(kind) or not own or self.top_logprobs is not None:
            return None
        found: int | None = sampler.largest_of(self.stages)  # type: ignore[attr-defined]
        return found

    def plainly(self) -> tuple[Any, ...]:
        """As values that tell one from another. NotPlain where its sampler does not say what its draw goes by."""
        kind, sampler = _who_draws(type(self.sampler)), self.sampler
        goes_by = None if kind is None else sampler.draw_goes_by(self.stages)  # type: ignore[attr-defined]
        if kind is None or goes_by is None:
            raise NotPlain(f"a draw of the sampler {sampler.name}")
        return class_name(kind), goes_by, self.rows, self.stages, self.top_logprobs, self.params

    @property
    def size(self) -> int:
        """Words of the host buffer."""
        return self.rows + sum(self.rows * math.prod(behind) for _, _, behind in self.params)

    def write(self, buffer: np.ndarray, params: Mapping[str, np.ndarray]) -> None:
        """Put these arrays, [R, …], where they lie in the host buffer."""
        start = self.rows
        for name, dtype, behind in self.params:
            length = self.rows * math.prod(behind)
            if name in params:
                buffer[start : start + length] = _words(params[name], dtype)
            start += length

    @property
    def narrow(self) -> bool:
        """Whether a row brings few numbers and no lists, and asks for its token alone. Such sets of stages are few,
        quickly compiled, and what nearly all rows use."""
        return self.top_logprobs is None and all(math.prod(behind) <= FEW_IDS for _, _, behind in self.params)


_ON_THE_HOST: Final = {name for name in vars(Sampler) if name != "draw" and not name.startswith("_")}
_OF_ANY_CLASS: Final = {*vars(type("", (), {})), "__qualname__", "__static_attributes__", "__firstlineno__"}


def _who_draws(kind: type[Any]) -> type[Any] | None:
    """The class that says what the draw of a sampler goes by; None where a class behind it has changed more than what
    runs on the host."""
    for base in kind.__mro__:
        if "draw_goes_by" in vars(base):
            return base
        if not _ON_THE_HOST.union(_OF_ANY_CLASS).issuperset(vars(base)):
            return None
    return None


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


def pack_draw(shape: DrawShape, slots: np.ndarray, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """One int32 buffer of the slots [R] and every array of a draw, in the order of `shape.params`."""
    parts = [slots]
    parts += [_words(params[name], dtype) for name, dtype, _ in shape.params]
    return np.concatenate(parts)


def _words(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == _BOOL:
        array = array.astype(np.int32)
    return np.ascontiguousarray(array).view(np.int32).reshape(-1)


@attrs.frozen(eq=False)
class Asked:
    """What the rows of a launch ask of the sampler."""

    shape: DrawShape
    buffer: np.ndarray  # int32, as `pack_draw` makes it
    unread: frozenset[str] = frozenset()  # as in SamplingArrays

    @classmethod
    def of(cls, sampler: Sampler, sampling: SamplingArrays, slots: np.ndarray) -> Asked:
        """slots int32 [R]: whose carries the draws become."""
        shape = DrawShape.of(sampler, sampling, len(slots))
        return cls(shape, pack_draw(shape, slots, sampling.params), sampling.unread)


def unpack_draw(shape: DrawShape, buffer: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    """The traced other side."""
    slots, start = buffer[: shape.rows], shape.rows
    params: dict[str, Any] = {}
    for name, dtype, behind in shape.params:
        size = (shape.rows, *behind)
        length = int(np.prod(size))
        words = buffer[start : start + length].reshape(size)
        start += length
        params[name] = words != 0 if dtype == _BOOL else jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
    return slots, params


def drawn(shape: DrawShape, logits: jax.Array, last: LastDrawn, buffer: jax.Array) -> tuple[LastDrawn, Found]:
    """The sampler over logits [R, V], and what it drew as the carry of each slot."""
    slots, params = unpack_draw(shape, buffer)
    carry = Carry(last.tokens[slots], last.observed[slots])
    sampling = SamplingArrays(shape.stages, params, shape.top_logprobs)
    made: Any = shape.sampler.draw(jnp, logits, sampling, carry)
    observed = last.observed
    if made.observed is not None:
        observed = observed.at[slots].set(made.observed)
    found = Found(
        jnp.stack([made.tokens, made.status.astype(jnp.int32)]),
        made.logprobs,
        made.top_ids,
        made.top_logprobs,
        made.observed,
    )
    return LastDrawn(last.tokens.at[slots].set(made.tokens), observed), found


draw = functools.partial(jax.jit, static_argnums=0, donate_argnums=2)(drawn)
"""`drawn` as a program of its own, behind any forward that gives R rows of logits."""
