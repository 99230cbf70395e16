"""Batched logits processors as stages: the arrays of the rows that use one, padded to a few shapes (spec S48)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import BatchedProcessor, Carry, LogitsProcessor
from mlxcel.errors import MlxcelError, PluginError, RequestError, shown
from mlxcel.plugins.sampling.pairs import NOBODY, closed_width
from mlxcel.plugins.sampling.stage import RowState

DTYPES = tuple(np.dtype(kind) for kind in (np.bool_, np.int32, np.uint32, np.float32))

MOST_ELEMENTS = 1 << 20
"""Of one array of one row."""

_LEAST_WIDTH = 8


@attrs.define(eq=False)
class ProcessorStage:
    """One batched processor at one place of a row's list: rows may ask for the same ones in different orders."""

    name: str  # without blanks
    processor: BatchedProcessor
    vocab: int
    foreign: str | None = None
    place: int = 0
    """The place among the row's processors whose names are in `kind`; one without a name is asked about every row."""
    kind: frozenset[str] = frozenset()
    nothing: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    """Of a stage that may be in a step where no row uses it: what `prepare` makes, as lists of length 0."""
    _layout: dict[str, tuple[np.dtype[Any], int]] = attrs.field(factory=dict, init=False)
    """Names, dtypes and ranks of the arrays of the first row that used it: arrays of all rows are stacked."""

    @property
    def lists(self) -> Mapping[str, int]:
        return {self._array(name): _fill(array.dtype) for name, array in self.nothing.items()}

    def prepare(self, spec: SequenceSpec) -> dict[str, np.ndarray] | None:
        """RequestError, with the processor's name, where it refuses the row or is not fit to run."""
        if self.foreign is None:
            made = self.processor.prepare({}, spec)
        else:
            entries = [entry for entry in spec.params.logits_processors if entry.name in self.kind]
            if len(entries) <= self.place or entries[self.place].name != self.foreign:
                return None
            made = prepared_by(self.foreign, self.processor, entries[self.place].args, spec)
        if made is None:
            return None
        if self.foreign is None:
            return dict(made)
        if not isinstance(made, Mapping):
            raise refusal(self.foreign, f"prepares a {type(made).__name__}, not arrays by name")
        arrays = {str(name): np.array(value) for name, value in made.items()}
        self._check(arrays)
        return arrays

    def closed(self, prepared: Any) -> bool:
        """Its history ends with the id in flight."""
        return True

    def pack(self, rows: Sequence[RowState], pending: Sequence[bool]) -> dict[str, np.ndarray]:
        uses: list[Mapping[str, np.ndarray] | None] = [row.prepared.get(self.name) for row in rows]
        like = next((use for use in uses if use is not None), self.nothing)
        packed = {
            self._array(name): _stacked([None if use is None else use[name] for use in uses], array, self.vocab)
            for name, array in like.items()
        }
        packed[f"{self.name} uses"] = np.array([use is not None for use in uses], bool)
        if self.processor.history:
            packed[f"{self.name} history"] = np.stack(
                [self._newest(row, coming) for row, coming in zip(rows, pending, strict=True)]
            )
            packed[f"{self.name} pending"] = np.array(pending, bool)
        return packed

    def apply(self, xp: Any, z: Any, params: Mapping[str, Any], carry: Carry) -> Any:
        """Rows that do not use it keep their bits, whatever it makes of them. A mask can only remove."""
        uses, begins = params[f"{self.name} uses"], self._array("")
        own = {name.removeprefix(begins): value for name, value in params.items() if name.startswith(begins)}
        made = self._run(xp, z, own, self._history(xp, z, params, carry))
        if self.processor.stage == "masks":
            made = xp.where(made == -xp.inf, made, xp.where(made == made, z, made))
        return xp.where(uses[:, None], made, z)

    def _array(self, name: str) -> str:
        """The name in a step of an array that `prepare` makes."""
        return f"{self.name} param {name}"

    def _newest(self, row: RowState, pending: bool) -> np.ndarray:
        """int32 [h]; with a draw in flight the last place is left for its id."""
        newest = np.full(self.processor.history, NOBODY, np.int32)
        ids = row.history.last(len(newest) - pending)
        end = len(newest) - pending
        newest[end - len(ids) : end] = ids
        return newest

    def _history(self, xp: Any, z: Any, params: Mapping[str, Any], carry: Carry) -> Any:
        if not self.processor.history:
            return xp.zeros((z.shape[0], 0), xp.int32)
        known = xp.asarray(params[f"{self.name} history"])
        newest = xp.where(params[f"{self.name} pending"], carry.tokens, known[:, -1])[:, None]
        return xp.concatenate([known[:, :-1], newest], axis=-1)

    def _run(self, xp: Any, z: Any, own: Mapping[str, Any], history: Any) -> Any:
        given = z
        if xp is np:  # what a traced array is by nature: other rows have theirs in it
            given = z.view()
            given.flags.writeable = False
        try:
            made = self.processor.apply(xp, given, own, history)
            shape, dtype = made.shape, made.dtype
        except MlxcelError:
            raise
        except Exception as error:
            raise PluginError(f"the logits processor {self.foreign!r} failed: {error!r}") from error
        if tuple(shape) != tuple(z.shape) or dtype != np.float32:
            raise PluginError(
                f"the logits processor {self.foreign!r} made {dtype} {list(shape)} of float32 {list(z.shape)}",
                hint="`apply` returns logits of the shape and dtype that it was given",
            )
        return made

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """A mistake found here is the row's own; one found in a step would be everybody's."""
        for name, array in arrays.items():
            if array.dtype not in DTYPES or array.size > MOST_ELEMENTS:
                words = f"prepares {name!r} as {array.dtype} {list(array.shape)}"
                raise refusal(
                    self.foreign, f"{words}: bool, int32, uint32 or float32, at most {MOST_ELEMENTS} elements"
                )
        layout = {name: (array.dtype, array.ndim) for name, array in arrays.items()}
        if self._layout and layout != self._layout:
            raise refusal(self.foreign, f"prepares {_words(layout)} after {_words(self._layout)} for another row")
        two = {name: _stacked([array, array], array, self.vocab) for name, array in arrays.items()}
        history = np.full((2, self.processor.history), NOBODY, np.int32)
        try:
            with np.errstate(all="ignore"):
                self._run(np, np.zeros((2, self.vocab), np.float32), two, history)
        except PluginError as error:
            raise RequestError(error.message, field="logits_processors", hint=error.hint) from error
        self._layout = layout


def prepared_by(name: str, processor: LogitsProcessor, args: str, spec: SequenceSpec) -> Any | None:
    """What a processor makes of a row's arguments, the JSON of an object. RequestError with its name when it fails."""
    try:
        return processor.prepare(json.loads(args), spec)
    except RequestError:
        raise
    except Exception as error:
        raise refusal(name, f"refuses its arguments: {error!r}") from error


def check_names(spec: SequenceSpec, known: Collection[str]) -> None:
    """RequestError for a processor that nobody registered."""
    for place, entry in enumerate(spec.params.logits_processors):
        if entry.name not in known:
            raise RequestError(
                f"logits_processors[{place}]: no logits processor is called {shown(entry.name)}",
                field=f"logits_processors[{place}].name",
                hint=f"known: {', '.join(known) or 'none'}; a plugin adds one with the hook mlxcel_logits_processors",
            )


def refusal(name: str | None, words: str) -> RequestError:
    return RequestError(f"the logits processor {name!r} {words}", field="logits_processors")


def _words(layout: Mapping[str, tuple[np.dtype[Any], int]]) -> str:
    return ", ".join(f"{name} ({dtype}, {rank} axes)" for name, (dtype, rank) in sorted(layout.items())) or "nothing"


def _fill(dtype: np.dtype[Any]) -> int:
    return NOBODY if dtype == np.int32 else 0


def _stacked(rows: Sequence[np.ndarray | None], like: np.ndarray, vocab: int) -> np.ndarray:
    """[R, …]: every axis padded to a closed width, int32 with -1 and anything else with 0; None is padding alone.
    `like` is one of the rows, or what they would be."""
    shapes = [like.shape, *(row.shape for row in rows if row is not None)]
    shape = [closed_width(max(sizes), vocab, least=_LEAST_WIDTH) for sizes in zip(*shapes, strict=True)]
    stacked = np.full((len(rows), *shape), _fill(like.dtype), like.dtype)
    for place, row in enumerate(rows):
        if row is not None:
            corner: Any = (place, *(slice(size) for size in row.shape))
            stacked[corner] = row
    return stacked
