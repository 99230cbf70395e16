"""A closed list of stage sets, so that a backend that compiles has compiled them all before it is ready (spec S44).

A step takes the first set that has what its rows use. Its other stages let those rows pass bit for bit (spec S3): so
neither what a row asks for nor who else is in the step can call for an executable that is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy as np

from mlxcel.core.plan import SamplingArrays
from mlxcel.plugins.sampling.logprobs import listed
from mlxcel.plugins.sampling.pack import DRAW, ENDS, FEATURES
from mlxcel.plugins.sampling.pairs import NOBODY
from mlxcel.plugins.sampling.selection import WHEN_USED
from mlxcel.plugins.sampling.stage import RowState, Stage

WIDTHS: Final = (64, 512, 4096)
"""Of all lists of a step together, so that levels add up and do not multiply. The last one is V."""

GREEDY: Final = (ENDS,)
"""What a greedy row uses, and every other row may: it is part of every set."""

USUAL: Final = (ENDS, "top_k", "top_p", "min_p", "temperature", DRAW)
"""What rows use that ask for nothing unusual: the defaults of every client, and most models' own."""

FAR: Final = (*USUAL, "far")
"""The same without a bound of how many ids a row keeps."""

_USUAL_ARRAYS: Final = (
    *("greedy", "seed_low", "seed_high", "position"),
    *("top_k", "top_p", "min_p", "temperature", "temperature_first"),
)
"""Of those behind the logit stages, what the draw of a usual row reads."""

_EXEMPT: Final = "xtc_exempt"

_KEPT: Final = 64
"""Sets at a number of rows whose idle arrays are kept: some kB each, V a list of the widest."""


_TOLD: Final = frozenset(("logprobs", "top_ids", "top_logprobs"))

_OBSERVING: Final = frozenset(("adaptive_p", "mirostat_1", "mirostat_2"))
"""Stages whose `commit` wants to know more of a draw than its token."""


def unread(exact: SamplingArrays) -> frozenset[str]:
    """Fields of StepResult that rows with these stages do not read, whatever a larger set gives."""
    told = _TOLD if exact.top_logprobs is None else frozenset()
    return told if _OBSERVING.intersection(exact.stages) else told | {"observed"}


@attrs.frozen
class StageSet:
    stages: tuple[str, ...]  # as in SamplingArrays
    width: int  # of every list of its arrays; 0: it has none
    top_logprobs: int | None

    def holds(self, stages: frozenset[str], width: int, top_logprobs: int | None) -> bool:
        listed = -1 if self.top_logprobs is None else self.top_logprobs
        wanted = -1 if top_logprobs is None else top_logprobs
        return stages.issubset(self.stages) and width <= self.width and wanted <= listed


def closed_sets(logit: Sequence[str], vocab: int) -> tuple[StageSet, ...]:
    """The list, cheapest first; the last one has everything. `logit` are the names of the logit stages."""
    widths = (*(width for width in WIDTHS if width < vocab), vocab)
    narrow = listed(1, vocab)
    scored = (*logit, *GREEDY, "raw_logprobs")
    everything = (*logit, *FEATURES, WHEN_USED)
    # Everything takes several times as long to compile, and sending lists is little of its time: no second width.
    few = dict.fromkeys((widths[0], *widths[2:-1]))
    sets = (
        StageSet(GREEDY, 0, None),
        StageSet(USUAL, 0, None),
        StageSet(FAR, 0, None),
        *(StageSet((*logit, *draw), width, None) for width in widths[: len(WIDTHS)] for draw in (GREEDY, FAR)),
        StageSet(scored, widths[0], narrow),
        StageSet((*logit, *FAR, "raw_logprobs"), widths[0], narrow),
        *(StageSet(everything, width, narrow) for width in few),
        StageSet(everything, vocab, vocab),
    )
    return tuple(dict.fromkeys(sets))


class StageSets:
    """The list for one chain, and the arrays of rows that use nothing."""

    def __init__(self, stages: Sequence[Stage], idle: RowState, drawing: Mapping[str, np.ndarray], vocab: int) -> None:
        """`stages` are the chain's logit stages, `idle` is a row that uses none, `drawing` its arrays [1, …] of all
        that stands behind them."""
        own = [stage for stage in stages if stage.foreign is None]
        self._order = (*(stage.name for stage in stages), *FEATURES, WHEN_USED)
        self._foreign = frozenset(stage.name for stage in stages if stage.foreign is not None)
        self._fills = {_EXEMPT: NOBODY} | {name: fill for stage in own for name, fill in stage.lists.items()}
        self._blank = {stage.name: stage.pack([idle], [False]) for stage in own}
        self._blank[ENDS] = {"ends": drawing["ends"]}
        self._blank[DRAW] = {name: drawing[name] for name in _USUAL_ARRAYS}
        self._blank[WHEN_USED] = {**drawing, _EXEMPT: np.full((1, 1), NOBODY, np.int32)}
        self._known = frozenset(name for blank in self._blank.values() for name in blank)
        self._sets = closed_sets([stage.name for stage in own], vocab)
        self._idle = functools.lru_cache(maxsize=_KEPT)(self._idle_arrays)

    def examples(self, rows: int) -> list[SamplingArrays]:
        """Of R = `rows` rows that use nothing, one for each set."""
        return [SamplingArrays(each.stages, self._idle_arrays(each, rows), each.top_logprobs) for each in self._sets]

    def superset(self, exact: SamplingArrays, rows: int) -> SamplingArrays:
        """The first set that has what `exact` has, with its arrays for all R = `rows` rows. What a third party's logits
        processor adds is not in the list and stays as it is."""
        own = frozenset(exact.stages) - self._foreign
        given = exact.params
        width = max([given[name].shape[1] for name in self._fills if name in given], default=0)
        chosen = next(each for each in self._sets if each.holds(own, width, exact.top_logprobs))
        params = {
            name: self._widened(name, given[name], width=chosen.width) if name in given else idle
            for name, idle in self._idle(chosen, rows).items()
        }
        stages = chosen.stages
        if added := self._foreign.intersection(exact.stages):
            has = added.union(stages)
            stages = tuple(name for name in self._order if name in has)
            params |= {name: array for name, array in given.items() if name not in self._known}
        return SamplingArrays(stages, params, chosen.top_logprobs, unread(exact))

    def _idle_arrays(self, chosen: StageSet, rows: int) -> dict[str, np.ndarray]:
        """Of rows that use no stage. They take no memory, however wide: all rows are one."""
        return {
            name: np.broadcast_to(one, (rows, *one.shape[1:]))
            for stage, blank in self._blank.items()
            if stage in chosen.stages
            for name, array in blank.items()
            for one in [self._widened(name, array, width=chosen.width)]
        }

    def _widened(self, name: str, array: np.ndarray, *, width: int) -> np.ndarray:
        """A list, [R, …], with what stands behind its end up to `width`; any other array as it is."""
        if name not in self._fills or array.shape[1] == width:
            return array
        wider = np.full((len(array), width), self._fills[name], array.dtype)
        wider[:, : array.shape[1]] = array
        return wider
