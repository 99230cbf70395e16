"""Sampled rows, from the first filter to the drawn token (spec 4.6 to 4.8)."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling import filters, mirostat, noise
from mlxcel.plugins.sampling.adaptive import adaptive_p
from mlxcel.plugins.sampling.pack import OFF
from mlxcel.plugins.sampling.selection import select
from mlxcel.plugins.sampling.temperature import dynamic, scale
from mlxcel.plugins.sampling.typical import typical
from mlxcel.plugins.sampling.xtc import marked, xtc


class Sampled(NamedTuple):
    """Of all rows; a greedy row's mean nothing."""

    tokens: Any  # int32 [R]
    drawn_from: Any  # float32 [R, V], the logits of the draw
    observed: Any  # float32 [R], the next mu or the next sum of adaptive-p; None where no row has either


FILTERS = (
    # name, function, whether min_keep counts there (spec S21)
    ("top_n_sigma", filters.top_n_sigma, False),
    ("top_k", filters.top_k, False),
    ("typ_p", typical, True),
    ("top_p", filters.top_p, True),
    ("min_p", filters.min_p, True),
)


def draw_sampled(xp: Any, z: Any, sampling: SamplingArrays, carry: Carry, newlines: Any) -> Sampled:
    """The highest of y + noise over what the stages left. z float32 [R, V], removed ones -inf, one finite at least.

    newlines: bool [V], where a row uses XTC.
    """
    step = _Step(xp, sampling, carry)
    first = step.params["temperature_first"]
    if step.has("temperature_first"):
        z = step.select(first, step.tempered(z, first), z)
    z = step.filtered(z)
    if step.has("xtc"):
        z = step.without_top_choices(z, newlines)
    # Every row's maximum goes to 0 here, whether or not another row has a temperature.
    y = step.tempered(z, ~first) if step.has("temperature") else scale(xp, z, 1, may_be_cold=False)
    return step.drawn(y)


class _Step:
    """One step's arrays under short names."""

    def __init__(self, xp: Any, sampling: SamplingArrays, carry: Carry) -> None:
        self.xp, self.params, self._stages, self._carry = xp, sampling.params, sampling.stages, carry

    def has(self, feature: str) -> bool:
        return feature in self._stages

    def column(self, name: str) -> Any:
        """[R, 1]"""
        return self.params[name][:, None]

    def select(self, rows: Any, changed: Any, z: Any) -> Any:
        """`changed` for the rows [R] that use a stage, z bit for bit for the others (spec S3)."""
        return select(self.xp, rows, changed, z)

    @property
    def keys(self) -> tuple[Any, Any, Any]:
        return self.params["seed_low"], self.params["seed_high"], self.params["position"]

    def tempered(self, z: Any, here: Any) -> Any:
        """(z - m) / T with each row's T; T = 1 for rows whose temperature is not `here` [R]."""
        xp, temperature = self.xp, self.column("temperature")
        if self.has("dynatemp"):
            spread = self.column("dynatemp_range")
            moved = dynamic(xp, z, temperature, spread, self.column("dynatemp_exponent"))
            temperature = xp.where(spread > 0, moved, temperature)
        temperature = xp.where(here[:, None], temperature, xp.float32(1))
        return scale(xp, z, temperature, may_be_cold=self.has("cold"))

    def filtered(self, z: Any) -> Any:
        xp = self.xp
        for name, function, counts in FILTERS:
            if self.has(name):
                value = self.column(name)
                idle = value == (z.shape[-1] if name == "top_k" else OFF[name])
                # ln 0 is no number to compute with; the row does not use it.
                safe = xp.where(idle, xp.ones_like(value), value)
                keep = {"keep": self.column("min_keep")} if counts and self.has("min_keep") else {}
                z = self.select(~idle[:, 0], function(xp, z, safe, **keep), z)
        return z

    def without_top_choices(self, z: Any, newlines: Any) -> Any:
        xp = self.xp
        gate = noise.uniform(xp, noise.words(xp, noise.row_keys(xp, *self.keys, noise.XTC_GATE), 1))
        exempt = marked(xp, self.params["xtc_exempt"], z.shape[-1]) | xp.asarray(newlines)
        hit = gate < self.column("xtc_probability")
        keep = self.column("min_keep") if self.has("min_keep") else None
        # A row whose gate is shut, as one without XTC always is, loses nothing.
        return xtc(xp, z, self.column("xtc_threshold"), hit, exempt, keep)

    def drawn(self, y: Any) -> Sampled:
        xp = self.xp
        versions = [version for version in (1, 2) if self.has(f"mirostat_{version}")]
        observed = p = None
        ahead = self._carry.observed[:, None]
        if self.has("adaptive_p"):
            total = xp.where(self.column("pending"), ahead, self.column("adaptive_total"))
            adapted, p = adaptive_p(xp, y, self.column("adaptive_target"), total, self.column("adaptive_weight"))
            y = self.select(self.params["adaptive_target"] > 0, adapted, y)
        if versions:
            mu = xp.where(self.column("pending"), ahead, self.column("mu"))
            for version in versions:
                kept = mirostat.by_surprise(xp, y, mu) if version == 2 else mirostat.by_rank(xp, y, mu)
                y = self.select(self.params["mirostat"] == version, kept, y)
        tokens = noise.gumbel_argmax(xp, y, noise.row_keys(xp, *self.keys, noise.DRAW))
        if p is not None:
            drawn = xp.take_along_axis(p, tokens[:, None], axis=-1)
            observed = drawn + self.column("adaptive_decay") * total
        if versions:
            moved = mirostat.next_mu(xp, y, tokens, mu, self.column("mirostat_tau"), self.column("mirostat_eta"))
            observed = moved if observed is None else xp.where(self.column("mirostat") > 0, moved, observed)
        return Sampled(tokens, y, None if observed is None else observed[:, 0])
