"""The sampler chain: array-API functions over [R, V]. Only the set of active stages is static."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry, Drawn
from mlxcel.errors import RequestError
from mlxcel.plugins.sampling import filters, noise
from mlxcel.plugins.sampling.logprobs import best, log_softmax

STAGES = ("top_k", "top_p", "min_p", "temperature")
"""Stages of this version by their names in `samplers`, in the order they run (spec 4.1)."""

FILTERS = (("top_k", filters.top_k), ("top_p", filters.top_p), ("min_p", filters.min_p))

FINE, NOT_A_NUMBER, NOTHING_ALLOWED = 0, 1, 2


@attrs.frozen
class ChainState:
    """A row's sampler state. Nothing of these stages changes from token to token."""

    params: SamplingParams


class ChainSampler:
    """Masks, then greedy rows leave by argmax; the others go through the filters, the temperature and a Gumbel draw.

    A row's result is a function of its own logits and parameters, bit for bit: over a row run only elementwise
    arithmetic, maxima, integer counts and one fixed tree of additions.
    """

    name = "chain"
    stage_order = STAGES

    def __init__(self, *, vocab: int, tokenizer_size: int | None = None) -> None:
        """`vocab` is V; ids at or above `tokenizer_size` are padding rows of the model and never drawn (spec S14)."""
        self._vocab = vocab
        self._named = vocab if tokenizer_size is None else min(tokenizer_size, vocab)

    def open(self, spec: SequenceSpec) -> ChainState:
        """RequestError for a sampled row whose seed nobody drew: its reply could not be reported or repeated."""
        if spec.params.seed < 0 and not spec.params.greedy:
            raise RequestError(
                f"seed is {spec.params.seed}, and a sampled sequence needs one that is drawn",
                field="seed",
                hint="give a seed from 0 to 2**63 - 1, or take the parameters from resolve_sampling, which draws one",
            )
        return ChainState(spec.params)

    def commit(self, state: ChainState, token: int, observed: float | None) -> None:
        """These stages remember nothing."""

    def closed(self, state: ChainState) -> bool:
        return True

    def pack(self, states: Sequence[ChainState], positions: Sequence[int], pending: Sequence[bool]) -> SamplingArrays:
        rows = [state.params for state in states]
        drawing = [row for row in rows if not row.greedy]
        active = {
            "top_k": any(0 < row.top_k < self._vocab for row in drawing),
            "top_p": any(row.top_p < 1 for row in drawing),
            "min_p": any(row.min_p > 0 for row in drawing),
            "temperature": bool(drawing),
        }
        top_k = [min(row.top_k, self._vocab) if row.top_k > 0 else self._vocab for row in rows]
        wanted = [row.logprobs for row in rows if row.logprobs is not None]
        return SamplingArrays(
            stages=tuple(stage for stage in STAGES if active[stage]),
            params={
                "greedy": np.array([row.greedy for row in rows], bool),
                # Greedy rows are divided by 1, and selected out of the result (spec S24).
                "temperature": np.array([1 if row.greedy else row.temperature for row in rows], np.float32),
                "top_k": np.array(top_k, np.int32),
                "top_p": np.array([row.top_p for row in rows], np.float32),
                "min_p": np.array([row.min_p for row in rows], np.float32),
                "seed_low": np.array([row.seed & 0xFFFFFFFF for row in rows], np.uint32),
                "seed_high": np.array([row.seed >> 32 & 0xFFFFFFFF for row in rows], np.uint32),
                "position": np.array(positions, np.uint32),
            },
            top_logprobs=max(wanted) if wanted else None,
        )

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        """As `Sampler.draw`. A row with a status other than 0 gets id -1; its log-probabilities mean nothing."""
        # Logits of opposite ends of float32 differ by more than it holds: -inf is then the right distance.
        with np.errstate(over="ignore"):
            return self._draw(xp, logits.astype(xp.float32), sampling)

    def _draw(self, xp: Any, raw: Any, sampling: SamplingArrays) -> Drawn:
        zero, minus_inf = xp.float32(0), xp.float32(-xp.inf)
        z = raw
        if self._named < raw.shape[-1]:
            z = xp.where(xp.arange(raw.shape[-1]) < self._named, raw, minus_inf)
        finite_or_removed = xp.all(raw < xp.inf, axis=-1)
        empty = xp.max(z, axis=-1) == minus_inf
        status = xp.where(finite_or_removed, xp.where(empty, NOTHING_ALLOWED, FINE), NOT_A_NUMBER).astype(xp.int32)
        fine = status == FINE
        z = xp.where(fine[:, None], z, zero)
        tokens = xp.argmax(z, axis=-1).astype(xp.int32)
        if "temperature" in sampling.stages:
            tokens = xp.where(sampling.params["greedy"], tokens, self._sample(xp, z, sampling))
        logprobs = top_ids = top_logprobs = None
        if sampling.top_logprobs is not None:
            values = log_softmax(xp, xp.where(fine[:, None], raw, zero))
            logprobs = xp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
            if sampling.top_logprobs:
                top_ids, top_logprobs = best(xp, values, sampling.top_logprobs)
        return Drawn(xp.where(fine, tokens, xp.int32(-1)), status, logprobs, top_ids, top_logprobs)

    def _sample(self, xp: Any, z: Any, sampling: SamplingArrays) -> Any:
        """argmax over survivors of (z - m) / T + Gumbel noise (spec S24, S27): int32 [R]."""
        params = sampling.params
        off = {"top_k": self._vocab, "top_p": 1, "min_p": 0}
        for stage, keep in FILTERS:
            if stage in sampling.stages:
                value = params[stage][:, None]
                idle = value == off[stage]
                # ln 0 is no number to compute with; the row does not use it.
                z = xp.where(idle, z, keep(xp, z, xp.where(idle, xp.ones_like(value), value)))
        scaled = (z - xp.max(z, axis=-1, keepdims=True)) / params["temperature"][:, None]
        keys = noise.row_keys(xp, params["seed_low"], params["seed_high"], params["position"], noise.DRAW)
        return xp.argmax(scaled + noise.gumbel(xp, noise.words(xp, keys, z.shape[-1])), axis=-1).astype(xp.int32)
