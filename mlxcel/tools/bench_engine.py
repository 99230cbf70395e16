"""`mlxcel bench-engine`: decode speed and time to first token of both client paths, in one process and without HTTP
(docs/spec/clients.md 6)."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.choose_backend import choose_backend
from mlxcel.errors import MlxcelError, UsageError
from mlxcel.kept_weights import KeptWeights
from mlxcel.tools.bench.asked import Asked
from mlxcel.tools.bench.cells import Cell, CellPlan, Path, cell_of, plan_cells
from mlxcel.tools.bench.clients import Client, open_client
from mlxcel.tools.bench.compare import Base, require_held
from mlxcel.tools.bench.device import copying
from mlxcel.tools.bench.measure import Measuring, Record
from mlxcel.tools.bench.records import header, summary
from mlxcel.tools.bench.report import table
from mlxcel.tools.bench.spent import Spent, process_age
from mlxcel.tools.bench.traffic import Traffic, traffic_of
from mlxcel.tools.bench.watch import Clock
from mlxcel.tools.garbage import no_collections, settled_objects
from mlxcel.tools.model_choice import ChosenModel, chosen_model

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager

log = logging.getLogger("mlxcel.bench")


def bench_engine(
    asked: Asked,
    config: EngineConfig,
    manager: PluginManager,
    progress: Progress,
    *,
    emit: Callable[[Record], None],
    say: Callable[[str], None],
    follow: Callable[[str], None] = lambda line: None,
    clock: Clock = time.perf_counter_ns,
) -> None:
    """Run every cell; `emit` gets each record as it is measured, `say` the lines for people, and `follow` one as each
    run ends, for those who wait.

    UsageError for what cannot be measured so, before anything is; behind the records, FiguresLost for what is slower
    than it was, MlxcelError for a run that was not what was asked for.
    """
    plan = plan_cells(asked.paths, asked.prompt_tokens, asked.batches, asked.max_tokens)
    if config.max_num_seqs is not None and config.max_num_seqs < plan.most_rows:
        raise UsageError(
            f"--batch {plan.most_rows} is more than --parallel {config.max_num_seqs}",
            hint="leave --parallel out, or raise it",
        )
    base = None if asked.compare is None else Base.read(asked.compare)
    if base is not None:
        base.require_cells(cell_of(asked.shape(cell, config)) for cell in plan.all)
    chosen = chosen_model(config, manager, random_weights=asked.random_weights, weights_seed=asked.weights_seed)
    for note in plan.notes:
        say(note)
    spent = Spent(clock)
    if (age := process_age()) is not None:
        spent.seconds["start"] = age
    run = _Run(asked, plan, base, chosen, config, manager, progress, emit, say, follow, clock, spent)
    run.cells()
    run.conclude()
    log.info("%s", spent.line)


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
    follow: Callable[[str], None]
    clock: Clock
    spent: Spent
    kept: KeptWeights = attrs.field(factory=KeptWeights)
    rows: list[Record] = attrs.field(factory=list)
    copies: list[float] = attrs.field(factory=list)

    def cells(self) -> None:
        """One engine at a time, and none while memory is copied: an engine may have taken all of it."""
        with self.spent.on("backend"):
            platform = choose_backend(self.config, self.manager).backend.caps.platform
        copy = copying(platform, self.config.device) if self.asked.copies else None
        with settled_objects():
            self._copy(copy)
            try:
                for path, cells in self.plan.cells.items():
                    self._path(path, cells, platform)
            finally:
                self.kept.close()
            self._copy(copy)

    def _path(self, path: Path, cells: Sequence[Cell], platform: str) -> None:
        copied = self.copies[0] if self.copies else None
        measuring = Measuring(
            self.asked, self.config, self.chosen, platform, copied, self.say, self.follow, self.clock, self.spent
        )
        with self.spent.on(f"opening {path}"):
            client = self._open(path, cells)
        try:
            traffic = traffic_of(self.chosen, client.model, self.manager)
            if not self.rows:
                with self.spent.on("header"):
                    self._begin(client, traffic)
            for cell in cells:
                with no_collections():
                    for row in measuring.rows(cell, client, traffic):
                        self.rows.append(row)
                        self.emit(row)
        finally:
            with self.spent.on("closing"):
                client.close()
                del client
                gc.collect()  # what it held is free before the next one counts the memory

    def conclude(self) -> None:
        """Behind all cells: their summaries, the table, and what is wrong with it."""
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
                hint="more --warmup-tokens meet them before; compiled programs are kept for the next run",
            )
        if self.base is not None:
            self.say(require_held(verdicts))

    def _open(self, path: Path, cells: Sequence[Cell]) -> Client:
        rows = max(cell.batch for cell in cells)
        return open_client(
            path,
            self.chosen,
            self.config,
            self.manager,
            self.progress,
            rows=rows,
            kept=self.kept,
            say=self.say,
            clock=self.clock,
        )

    def _begin(self, client: Client, traffic: Traffic) -> None:
        """Before the first cell: the header, and whether the base is of the same device and model."""
        found = header(
            client.model,
            traffic,
            random_weights=self.asked.random_weights,
            label=self.asked.label,
            argv=list(self.asked.argv),
            env=dict(self.asked.env),
            copy_gb_s=self.copies[0] if self.copies else None,
        )
        if self.base is not None:
            self.base.require_same(found)
        self.emit(found)

    def _copy(self, copy: Callable[[], float] | None) -> None:
        if copy is not None:
            with self.spent.on("copies"):
                self.copies.append(copy())
