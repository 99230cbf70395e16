"""Engines whose every draw is seen with its logits, on any backend, by the backend's own contract alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
from random_engines import Bench, GreedySampler

from mlxcel.core.plan import Decode, SamplingArrays, Ticket
from mlxcel.core.sampling import Carry, Drawn
from mlxcel.plugins.sampling.chain import ChainSampler

DIGEST: Final = 4
"""Values that stand for the V logits of a draw."""
_SPREAD: Final = np.uint32(2654435761)
"""Odd, about 2**32 over the golden ratio: neighbouring places get weights that are far apart."""


def digest(xp: Any, logits: Any) -> Any:
    """Two sums over the bits of logits float32 [R, V], each as two whole numbers below 2**16: float32 [R, 4].

    Each place has a weight of its own, which is odd: one place that differs, in whatever bits, is always seen, and
    several are missed by both sums once in 2**64.
    """
    bits, place = logits.view(xp.uint32), xp.arange(logits.shape[-1], dtype=xp.uint32)
    first = xp.sum(bits * ((place * _SPREAD) | xp.uint32(1)), axis=-1, dtype=xp.uint32)
    mixed = bits ^ (bits >> xp.uint32(15))
    second = xp.sum(mixed * (((place ^ xp.uint32(0x5BD1E995)) * _SPREAD) | xp.uint32(1)), axis=-1, dtype=xp.uint32)
    halves = [half for total in (first, second) for half in (total >> xp.uint32(16), total & xp.uint32(0xFFFF))]
    return xp.stack(halves, axis=-1).astype(xp.float32)


class WitnessSampler(GreedySampler):
    """The chain of greedy rows, which gives all V logits of each draw back as its listed log-probabilities."""

    def pack(self, *rows: Any, **how: Any) -> SamplingArrays:
        return attrs.evolve(super().pack(*rows, **how), unread=frozenset())

    def draw_goes_by(self, stages: Sequence[str]) -> tuple[Any, ...] | None:
        """What the chain's goes by: the change to it is in this file."""
        return super().draw_goes_by(stages)

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        return super().draw(xp, logits, sampling, carry)._replace(top_logprobs=self.shown(xp, logits))

    def shown(self, xp: Any, logits: Any) -> Any:
        return logits


class DigestSampler(WitnessSampler):
    """The same with their digest, since V values a token are more than a long run can bring to the host. The token
    follows from the digest too: greedy replies of random weights soon say the same token again and again, and in these
    one bit that differs makes every later token another."""

    def draw_goes_by(self, stages: Sequence[str]) -> tuple[Any, ...] | None:
        """What the chain's goes by: the change to it is in this file."""
        return super().draw_goes_by(stages)

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        drawn = super().draw(xp, logits, sampling, carry)
        halves = drawn.top_logprobs.astype(xp.uint32)
        word = halves[:, 0] * xp.uint32(1 << 16) + halves[:, 1]
        tokens = (word % xp.uint32(logits.shape[-1])).astype(xp.int32)
        return drawn._replace(tokens=xp.where(drawn.status == 0, tokens, drawn.tokens))

    def shown(self, xp: Any, logits: Any) -> Any:
        return digest(xp, logits)


class CompanySampler(ChainSampler):
    """The chain with the digest, greedy and sampled rows by the one set of stages of a usual draw: whoever comes and
    goes, a step has the same programs."""

    def stage_sets(self, rows: int) -> list[SamplingArrays]:
        return super().stage_sets(rows)[1:2]

    def pack_scores(self, targets: np.ndarray, top: int) -> SamplingArrays:
        (only,) = self.stage_sets(len(targets))
        return only

    def pack(self, states: Any, positions: Any, pending: Any, *, closed: bool = False) -> SamplingArrays:
        exact = super().pack(states, positions, pending)
        (usual,) = self.stage_sets(len(states))
        if not set(exact.stages) <= set(usual.stages):
            raise ValueError(f"rows use {exact.stages}: a usual draw has {usual.stages}")
        params = {name: exact.params.get(name, idle) for name, idle in usual.params.items()}
        return SamplingArrays(usual.stages, params, None)

    def draw_goes_by(self, stages: Sequence[str]) -> tuple[Any, ...] | None:
        """What the chain's goes by: the change to it is in this file."""
        return super().draw_goes_by(stages)

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        return super().draw(xp, logits, sampling, carry)._replace(top_logprobs=digest(xp, logits))


class Witness:
    """A backend, and in `kept` what it drew from: logits float32 [V], or their digest, by (sequence id, position of the
    drawn token)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.kept: dict[tuple[int, int], np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, plan: Any) -> Any:
        return plan, self._backend.submit(plan)

    def submit_run(self, plans: Any) -> Any:
        return list(zip(plans, self._backend.submit_run(plans), strict=True))

    def read(self, handle: Any) -> Any:
        """A run of steps brings tokens and nothing else to the host."""
        plan, own = handle
        result = self._backend.read(own)
        if result.top_logprobs is None:
            return result
        for place, row in enumerate(plan.draw_rows):
            self.kept[int(plan.sequence_ids[row]), int(plan.seq_lens[row])] = result.top_logprobs[place].copy()
        return attrs.evolve(result, top_logprobs=None)


@attrs.frozen
class Seen:
    """What a row drew, and from what: logits float32 [drawn, V], or their digests."""

    ids: tuple[int, ...]
    logits: np.ndarray

    def first(self, count: int) -> Seen:
        """Its first draws."""
        return Seen(self.ids[:count], self.logits[:count])


def seen(bench: Bench, row: int) -> Seen:
    """Of a row of an engine over a Witness, which is closed."""
    kept = bench.backend.kept
    positions = sorted(position for sequence, position in kept if sequence == row)
    logits = np.stack([kept.pop((row, position)) for position in positions])
    ids = tuple(bench.engine.view(row).output)
    bench.engine.close(row)
    if len(logits) < len(ids):
        raise RuntimeError(f"{len(ids)} tokens and the logits of {len(logits)}: steps of a run bring none")
    return Seen(ids, logits[: len(ids)])


def decode(bench: Bench, rows: Sequence[int], steps: int) -> None:
    """`steps` steps over these rows, one of them ahead. Never runs of steps, which bring no logits."""
    engine, parts = bench.engine, [Decode(row) for row in rows]
    in_flight: list[Ticket] = []
    for step in range(steps + 1):
        if step < steps:
            engine.reserve(parts)
            in_flight.append(engine.submit(parts))
        if step:
            for outcome in engine.collect(in_flight.pop(0)):
                if outcome.error is not None:
                    raise outcome.error


def alone(
    bench: Bench, ids: Sequence[int] | np.ndarray, steps: int, *, chunk: int | None = None, **params: Any
) -> Seen:
    """A lone row: its first token and `steps` more."""
    row = bench.begin(ids, chunk=chunk, **params)
    if steps:
        decode(bench, [row], steps)
    return seen(bench, row)


def difference(one: Seen, other: Seen) -> str:
    """ "" for the same ids and the same bits, else where they part."""
    if len(one.ids) != len(other.ids):
        return f"{len(one.ids)} and {len(other.ids)} tokens"
    if one.ids != other.ids:
        step = next(n for n, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)) if a != b)
        return f"ids differ from step {step} on"
    if one.logits.shape != other.logits.shape:
        return f"{len(one.logits)} and {len(other.logits)} logits"
    unequal = one.logits.view(np.int32) != other.logits.view(np.int32)
    if not unequal.any():
        return ""
    step, place = np.argwhere(unequal)[0]
    if one.logits.shape[1] == DIGEST:
        return f"the logits of {int(unequal.any(axis=1).sum())} steps differ, first of step {step}"
    a, b = float(one.logits[step, place]), float(other.logits[step, place])
    return f"{int(unequal.sum())} logits differ, first at step {step}: id {place}, {a!r} and {b!r}"
