"""`mlxcel bench-engine`: decode speed and time to first token of both client paths, in one process and without HTTP
(docs/spec/clients.md 6)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import MlxcelError, UsageError
from mlxcel.tools.bench.cells import Cell, CellPlan, Path, cell_of, plan_cells
from mlxcel.tools.bench.clients import Client, open_client
from mlxcel.tools.bench.compare import Base, lost_words
from mlxcel.tools.bench.device import copy_gb_s, peak_bytes
from mlxcel.tools.bench.records import header, summary
from mlxcel.tools.bench.report import table
from mlxcel.tools.bench.timing import MS, figures
from mlxcel.tools.bench.traffic import Traffic, traffic_of
from mlxcel.tools.bench.watch import Clock, WatchedRow, times
from mlxcel.tools.model_choice import ChosenModel, chosen_model
from mlxcel.tools.sampling_cases import case_params

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.engine import Engine
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager

Record = dict[str, Any]

LOSS: Final = 1
"""The exit code of a figure that is lost."""


@attrs.frozen
class Asked:
    """What is measured. Lists are in the order in which they are run; `compare` names a file of earlier records."""

    paths: tuple[Path, ...]
    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    max_tokens: int
    repeats: int
    warmup_tokens: int
    sampling: str
    random_weights: str | None = None
    weights_seed: int = 0
    label: str | None = None
    compare: str | None = None
    copies: bool = True
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)


def bench_engine(
    asked: Asked,
    config: EngineConfig,
    manager: PluginManager,
    progress: Progress,
    *,
    emit: Callable[[Record], None],
    say: Callable[[str], None],
    clock: Clock = time.perf_counter_ns,
) -> int:
    """Run every cell; `emit` gets each record as it is measured, `say` the lines for people. The exit code: 0, or LOSS.

    UsageError for what cannot be measured so, before anything is; MlxcelError, behind its records, for a run that was
    not what was asked for.
    """
    plan = plan_cells(asked.paths, asked.prompt_tokens, asked.batches, asked.max_tokens)
    if config.max_num_seqs is not None and config.max_num_seqs < plan.most_rows:
        raise UsageError(
            f"--batch {plan.most_rows} is more than --parallel {config.max_num_seqs}",
            hint="leave --parallel out, or raise it",
        )
    base = None if asked.compare is None else Base.read(asked.compare)
    if base is not None:
        base.require_cells(cell_of(_shape(cell, asked, config)) for cell in plan.all)
    chosen = chosen_model(config, manager, random_weights=asked.random_weights, weights_seed=asked.weights_seed)
    for note in plan.notes:
        say(note)
    run = _Run(asked, plan, base, chosen, config, manager, progress, emit, say, clock)
    run.cells()
    return run.verdict()


@attrs.define
class _Run:
    asked: Asked
    plan: CellPlan
    base: Base | None
    chosen: ChosenModel
    config: EngineConfig
    manager: PluginManager
    progress: Progress
    emit: Callable[[Record], None]
    say: Callable[[str], None]
    clock: Clock
    rows: list[Record] = attrs.field(factory=list)
    copies: list[float] = attrs.field(factory=list)
    begun: bool = False  # whether the header was written

    def cells(self) -> None:
        """One engine at a time: a second one would halve the memory that each may take."""
        last = tuple(self.plan.cells)[-1]
        for path, cells in self.plan.cells.items():
            client = self._open(path, cells)
            try:
                traffic = traffic_of(self.chosen, client.model, self.manager)
                self._begin(client, traffic)
                for cell in cells:
                    with no_collections():
                        self._measure(cell, client, traffic)
                if path == last:
                    self._copy(client)
            finally:
                client.close()

    def verdict(self) -> int:
        """Behind all cells: their summaries, the table, and what it comes to."""
        cells: dict[tuple[Any, ...], list[Record]] = {}
        for row in self.rows:
            cells.setdefault(cell_of(row), []).append(row)
        summaries = [summary(rows, self.copies) for rows in cells.values()]
        for found in summaries:
            self.emit(found)
        for line in table(summaries):
            self.say(line)
        verdicts = [] if self.base is None else list(self.base.verdicts(self.rows))
        for verdict in verdicts:
            self.say(verdict.line)
        if compiled := sum(row["compiles"] for row in self.rows):
            raise MlxcelError(
                f"{compiled} programs were compiled while the clock ran: the rows with a note are no measurement",
                hint="more --warmup-tokens, or a --repeats more than was asked for, meets them before",
            )
        if any(verdict.lost for verdict in verdicts):
            self.say(lost_words(verdicts))
            return LOSS
        return 0

    def _open(self, path: Path, cells: Sequence[Cell]) -> Client:
        rows = max(cell.batch for cell in cells)
        return open_client(
            path,
            self.chosen,
            self.config,
            self.manager,
            self.progress,
            rows=rows,
            say=self.say,
            clock=self.clock,
        )

    def _begin(self, client: Client, traffic: Traffic) -> None:
        """Before the first cell: the copy, the header, and whether the base is of the same device and model."""
        if self.begun:
            return
        self.begun = True
        self._copy(client)
        asked = self.asked
        found = header(
            client.model,
            traffic,
            random_weights=asked.random_weights,
            label=asked.label,
            argv=list(asked.argv),
            env=dict(asked.env),
            copy_gb_s=self.copies[0] if self.copies else None,
        )
        if self.base is not None:
            self.base.require_same(found)
        self.emit(found)

    def _copy(self, client: Client) -> None:
        if self.asked.copies:
            self.copies.append(copy_gb_s(client.model.caps.platform, self.config.device))

    def _measure(self, cell: Cell, client: Client, traffic: Traffic) -> None:
        """One unmeasured generation, then the repeats, each a row."""
        asked, model = self.asked, client.model
        length = cell.prompt_tokens(model.facts.context)
        if length < cell.prompt_target_len:
            self.say(
                f"a prompt of {cell.prompt_target_len} tokens is cut to {length}: the context holds "
                f"{model.facts.context}, and {cell.max_tokens} are for the reply"
            )
        prompts = cell_prompts(self.chosen, model.tokenizer, model.facts.vocab, length, cell.batch)
        params = case_params(asked.sampling, max_tokens=cell.max_tokens)
        # Rows of a batch come to their first token one after the other, so that it goes through more programs than a
        # few tokens of it would show.
        few = cell.max_tokens if cell.batch > 1 else min(asked.warmup_tokens, cell.max_tokens)
        began = self.clock()
        client.run(prompts, params.clone(max_tokens=few))
        warmup_ms = (self.clock() - began) / MS
        for repeat in range(1, asked.repeats + 1):
            before = compiled(model.engine)
            ran = client.run(prompts, params)
            compiles = compiled(model.engine) - before
            seen = client.watch.rows()
            require_tokens(seen, cell)
            row = {
                "kind": "row",
                **_shape(cell, asked, self.config),
                "repeat": repeat,
                "prompt_tokens": length,
                "generated_tokens": sum(len(row.tokens) for row in seen),
                **figures(times(seen, ran.handed), length),
                **self._bandwidth(cell, length, traffic, seen, ran.handed),
                "pieces": [row.pieces for row in seen],
                "kv_storage": model.engine.kv_storage,
                "attention_launches": client.watch.launches(),
                "compiles": compiles,
                "finish_cause": ", ".join(dict.fromkeys(ran.causes)),
                "warmup_ms": warmup_ms,
                "memory_peak_bytes": peak_bytes(model.caps.platform, self.config.device),
            }
            row["note"] = note_of(row)
            self.rows.append(row)
            self.emit(row)

    def _bandwidth(self, cell: Cell, length: int, traffic: Traffic, seen: Sequence[WatchedRow], handed: int) -> Record:
        """Of a step at the mean position: the i-th of the N - 1 decode steps reads `length` + i positions."""
        size = traffic.step_bytes(cell.batch, length + cell.max_tokens / 2)
        rate = size / figures(times(seen, handed), length)["ms_per_token"] / 1e6
        share = 100 * rate / self.copies[0] if self.copies else None
        return {"bytes_per_step": size, "achieved_gb_s": rate, "percent_of_copy": share}


def cell_prompts(chosen: ChosenModel, tokenizer: Tokenizer, vocab: int, length: int, rows: int) -> list[np.ndarray]:
    """int32 [`length`] each: one prompt, whose first token is another one in each row, so that none can be taken for
    another's."""
    prompt = chosen.prompt(tokenizer, length)
    found = [prompt.copy() for _ in range(rows)]
    for place, ids in enumerate(found):
        ids[0] = (int(prompt[0]) + place) % vocab
    return found


def require_tokens(seen: Sequence[WatchedRow], cell: Cell) -> None:
    """MlxcelError where the engine resolved another number of tokens: a row that was preempted ran twice."""
    for place, row in enumerate(seen):
        if len(row.tokens) != cell.max_tokens:
            raise MlxcelError(
                f"row {place} resolved {len(row.tokens)} tokens of {cell.max_tokens}",
                hint="it began again, or ended early: a smaller --batch or a larger --kv-cache-budget may help",
            )


def note_of(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a row as a measurement of what was asked for; None for nothing."""
    notes = []
    if row["compiles"]:
        notes.append(f"{row['compiles']} programs compiled while the clock ran")
    routes = [route for phase in row["attention_launches"].values() for route in phase]
    if row["kv_storage"] == "paged" and not any("paged" in route for route in routes):
        notes.append("paged storage, no paged launch")
    return "; ".join(notes) or None


def compiled(engine: Engine) -> int:
    """Programs so far, 0 where nothing is compiled."""
    found = engine.compilations
    return 0 if found is None else found.warm_up + found.service


@contextmanager
def no_collections() -> Iterator[None]:
    """Garbage is collected before, and not inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _shape(cell: Cell, asked: Asked, config: EngineConfig) -> Record:
    """The fields of SHAPE."""
    return {
        "path": cell.path,
        "batch": cell.batch,
        "prompt_target_len": cell.prompt_target_len,
        "max_tokens": cell.max_tokens,
        "sampling": asked.sampling,
        "prefill_chunk": config.prefill_chunk,
        "kv_storage_asked": config.kv_storage,
    }
