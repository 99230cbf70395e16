"""Sampled rows, from the first filter to the drawn token (spec 4.6 to 4.8)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import numpy as np

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling import filters, mirostat, noise
from mlxcel.plugins.sampling.adaptive import adaptive_p
from mlxcel.plugins.sampling.leading import leading
from mlxcel.plugins.sampling.pack import OFF
from mlxcel.plugins.sampling.selection import WHEN_USED, select, when
from mlxcel.plugins.sampling.temperature import dynamic, scale
from mlxcel.plugins.sampling.threshold import ordered_image
from mlxcel.plugins.sampling.typical import typical
from mlxcel.plugins.sampling.xtc import marked, xtc


class Sampled(NamedTuple):
    """Of all rows; a greedy row's mean nothing."""

    tokens: Any  # int32 [R]
    drawn_from: Any  # float32 [R, V], the logits of the draw
    observed: Any  # float32 [R], the next mu or the next sum of adaptive-p; None where no row has either


FILTERS = (
    # name, function, what it takes: min_keep where that counts (spec S21), the maxima, the largest values
    ("top_n_sigma", filters.top_n_sigma, {"peak"}),
    ("top_k", filters.top_k, {"listed"}),
    ("typ_p", typical, {"keep", "peak"}),
    ("top_p", filters.top_p, {"keep", "peak", "listed"}),
    ("min_p", filters.min_p, {"keep", "peak"}),
)


def draw_sampled(xp: Any, z: Any, peak: Any, sampling: SamplingArrays, carry: Carry, newlines: Any) -> Sampled:
    """The highest of y + noise over what the stages left. z float32 [R, V], removed ones -inf, one finite at least.

    peak: float32 [R], the maxima of z. They are looked for once: on a GPU that takes two launches.
    newlines: bool [V], where a row uses XTC.
    """
    step = _Step(xp, sampling, carry, peak[:, None])
    first = step.params["temperature_first"]
    if step.has("temperature_first"):
        z = step.changed(first, lambda z: step.tempered(z, first), z)
        step.peak = xp.where(first[:, None], xp.float32(0), step.peak)
    z = step.filtered(z)
    if step.has("xtc"):
        z = step.without_top_choices(z, newlines)
    # Every row's maximum goes to 0 here, whether or not another row has a temperature.
    y = step.tempered(z, ~first) if step.has("temperature") else scale(xp, z, 1, may_be_cold=False, peak=step.peak)
    return step.drawn(y)


class _Step:
    """One step's arrays under short names."""

    def __init__(self, xp: Any, sampling: SamplingArrays, carry: Carry, peak: Any) -> None:
        self.xp, self.params, self._stages, self._carry = xp, sampling.params, sampling.stages, carry
        self.peak: Any | None = peak  # [R, 1], None where it is no longer known
        self._listed: Any | None = None  # [R, LISTED], once top_k has found them: what it keeps is among them

    def has(self, feature: str) -> bool:
        return feature in self._stages

    def column(self, name: str) -> Any:
        """[R, 1]"""
        return self.params[name][:, None]

    def when(self, rows: Any, make: Callable[[], Any], otherwise: Any) -> Any:
        """`make()`, which a step of more stages than its rows use leaves out where no row [R] is True."""
        return when(self.xp, rows, make, otherwise) if self.has(WHEN_USED) else make()

    def changed(self, rows: Any, change: Callable[[Any], Any], z: Any) -> Any:
        """What `change` makes of z for the rows [R] that use a stage, z bit for bit for the others (spec S3)."""
        return self.when(rows, lambda: select(self.xp, rows, change(z), z), z)

    @property
    def keys(self) -> tuple[Any, Any, Any]:
        return self.params["seed_low"], self.params["seed_high"], self.params["position"]

    def tempered(self, z: Any, here: Any) -> Any:
        """(z - m) / T with each row's T; T = 1 for rows whose temperature is not `here` [R]."""
        xp, temperature = self.xp, self.column("temperature")
        if self.has("dynatemp"):
            spread, exponent = self.column("dynatemp_range"), self.column("dynatemp_exponent")
            moved = spread > 0
            temperature = self.when(
                moved, lambda: xp.where(moved, dynamic(xp, z, temperature, spread, exponent), temperature), temperature
            )
        temperature = xp.where(here[:, None], temperature, xp.float32(1))
        return scale(xp, z, temperature, may_be_cold=self.has("cold"), peak=self.peak)

    def filtered(self, z: Any) -> Any:
        for name, function, takes in FILTERS:
            if self.has(name):
                if name == "top_k" and not self.has("far") and self.xp is not np:
                    self._listed = leading(ordered_image(self.xp, z))
                idle = self.params[name] == (z.shape[-1] if name == "top_k" else OFF[name])
                z = self.changed(~idle, functools.partial(self._filter, name, function, takes), z)
                if name == "typ_p":  # It alone may remove a maximum.
                    self.peak = self.xp.max(z, axis=-1, keepdims=True)
        return z

    def _filter(self, name: str, function: Callable[..., Any], takes: Set[str], z: Any) -> Any:
        """Of rows that use it; what becomes of the others does not count."""
        xp, value = self.xp, self.column(name)
        idle = value == (z.shape[-1] if name == "top_k" else OFF[name])
        # ln 0 is no number to compute with.
        value = xp.where(idle, xp.ones_like(value), value)
        given = {
            "peak": self.peak,
            "keep": self.column("min_keep") if self.has("min_keep") else None,
            "listed": self._listed,
        }
        return function(xp, z, value, **{name: given[name] for name in takes})

    def without_top_choices(self, z: Any, newlines: Any) -> Any:
        xp, self.peak = self.xp, None
        gate = noise.uniform(xp, noise.words(xp, noise.row_keys(xp, *self.keys, noise.XTC_GATE), 1))
        # A row whose gate is shut, as one without XTC always is, loses nothing.
        hit = gate < self.column("xtc_probability")

        def without() -> Any:
            exempt = marked(xp, self.params["xtc_exempt"], z.shape[-1]) | xp.asarray(newlines)
            keep = self.column("min_keep") if self.has("min_keep") else None
            return xtc(xp, z, self.column("xtc_threshold"), hit, exempt, keep)

        return self.when(hit, without, z)

    def drawn(self, y: Any) -> Sampled:
        xp = self.xp
        versions = [version for version in (1, 2) if self.has(f"mirostat_{version}")]
        observed = p = None
        ahead = self._carry.observed[:, None]
        if self.has("adaptive_p"):
            total = xp.where(self.column("pending"), ahead, self.column("adaptive_total"))
            y, p = self._adapted(y, total)
        if versions:
            mu = xp.where(self.column("pending"), ahead, self.column("mu"))
            for version in versions:
                keep = mirostat.by_surprise if version == 2 else mirostat.by_rank
                y = self.changed(self.params["mirostat"] == version, functools.partial(keep, xp, mu=mu), y)
        tokens = noise.gumbel_argmax(xp, y, noise.row_keys(xp, *self.keys, noise.DRAW))
        if p is not None:
            drawn = xp.take_along_axis(p, tokens[:, None], axis=-1)
            observed = drawn + self.column("adaptive_decay") * total
        if versions:
            moved = mirostat.next_mu(xp, y, tokens, mu, self.column("mirostat_tau"), self.column("mirostat_eta"))
            observed = moved if observed is None else xp.where(self.column("mirostat") > 0, moved, observed)
        return Sampled(tokens, y, None if observed is None else observed[:, 0])

    def _adapted(self, y: Any, total: Any) -> tuple[Any, Any]:
        """y with the logits of adaptive-p in the rows that use it, and their p, float32 [R, V] both."""
        xp, uses = self.xp, self.params["adaptive_target"] > 0

        def adapted() -> tuple[Any, Any]:
            made, p = adaptive_p(xp, y, self.column("adaptive_target"), total, self.column("adaptive_weight"))
            return select(xp, uses, made, y), p

        found: tuple[Any, Any] = self.when(uses, adapted, (y, y))
        return found
