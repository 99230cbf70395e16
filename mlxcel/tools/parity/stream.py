"""What an arm gave for a case: a stream of tokens with how it came about, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import attrs

from mlxcel.tools.parity.watch import Company

Candidates = tuple[tuple[int, float], ...]
"""The best of a step as (id, score), best first; fewer where no more could be drawn."""


class NotAvailable(StrEnum):
    """Why there is nothing to compare."""

    STORAGE_REFUSED = "storage refused"
    NO_PAGED_LAUNCH = "no paged launch"
    NO_REUSABLE_PREFIX = "family has no reusable prefix"
    NO_HIT = "no hit"  # with the reason of the cache behind it
    BACKEND_UNAVAILABLE = "backend unavailable"
    ONE_ROW_ONLY = "batch 1 only"


@attrs.frozen
class Missing:
    """An arm that cannot run here, or ran and is no evidence. `detail` is for people; of NO_HIT the cache's reason."""

    reason: NotAvailable
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.reason is NotAvailable.NO_HIT else str(self.reason)


@attrs.frozen
class Failed:
    """An arm that went wrong."""

    message: str


@attrs.frozen
class Stream:
    """One request as it ran. `pieces` are (start, end, padding) of each piece, `adopted` the positions that no piece
    computed; `launches` counts layer calls by phase and route in the steps that the row was part of, `company` are the
    rows it shared them with. `reproduces`: whether the plan that ran gives the bits of one from nothing. `scores` [N]
    are the log-probabilities of the tokens that the backend pair asks for, by this arm's backend. `missing`: it ran,
    and is no evidence."""

    case: str
    arm: str
    token_ids: tuple[int, ...]
    best: tuple[Candidates, ...]
    adopted: tuple[int, int]
    pieces: tuple[tuple[int, int, int], ...]
    kv_storage: str
    launches: Mapping[str, Mapping[str, int]]
    cached_tokens: int
    reproduces: bool
    finish_cause: str
    ms: float
    company: Company
    scores: tuple[float, ...] = ()
    missing: Missing | None = None

    @property
    def paged_launches(self) -> int:
        """Layer calls by a route over pages, the reference's own included."""
        return sum(
            count
            for routes in self.launches.values()
            for route, count in routes.items()
            if route.removeprefix("ref_").startswith("paged_")
        )

    def gap(self, step: int) -> float:
        """Between the two best of a step, in nats; infinite where there was one alone."""
        best = self.best[step]
        return best[0][1] - best[1][1] if len(best) > 1 else math.inf


Found = Stream | Missing | Failed
