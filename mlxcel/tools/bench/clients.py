"""The two clients that are measured: `generate`'s, over the engine alone, and the scheduler's worker as `serve` has it.

Each is opened once, runs any number of generations, and knows what the engine did in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from mlxcel.choose_backend import choose_backend
from mlxcel.core.bind_params import Caps
from mlxcel.core.request import Request
from mlxcel.direct import generate
from mlxcel.errors import MlxcelError, UsageError
from mlxcel.kv_setup import Rows
from mlxcel.prepare import Prompt, sequence_spec
from mlxcel.tools.bench.watch import StepWatch

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.params import SamplingParams
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.result import RequestResult
    from mlxcel.core.source import Progress
    from mlxcel.kept_weights import KeptWeights
    from mlxcel.load import LoadedModel
    from mlxcel.plugins.manager import PluginManager
    from mlxcel.serve_engine import Serving
    from mlxcel.tools.bench.cells import Path
    from mlxcel.tools.bench.watch import Clock
    from mlxcel.tools.model_choice import ChosenModel


@attrs.frozen
class Ran:
    """`handed`: the clock's reading from just before the ids were handed over; `causes` ended the rows."""

    handed: int
    causes: tuple[str, ...]


class Client(Protocol):
    """`watch` is told of every step of its engine."""

    @property
    def model(self) -> LoadedModel: ...

    @property
    def watch(self) -> StepWatch: ...

    def run(self, prompts: Sequence[np.ndarray], params: SamplingParams) -> Ran:
        """Generate from all prompts together, int32 [P] each, to the end of every one. MlxcelError for a row that
        failed or ended early."""
        ...

    def close(self) -> None: ...


@attrs.frozen(eq=False)
class DirectClient:
    """One row, prompt by prompt."""

    model: LoadedModel
    watch: StepWatch
    clock: Clock
    run_ahead: bool

    def run(self, prompts: Sequence[np.ndarray], params: SamplingParams) -> Ran:
        (spec,) = _specs(self.model, prompts, params)
        self.watch.begin(prompts)
        handed = self.clock()
        result = generate(
            self.model.engine,
            spec,
            planner=self.model.planner,
            observers=self.model.observers,
            run_ahead=self.run_ahead,
        )
        return Ran(handed, (_whole(result, params),))

    def close(self) -> None:
        self.model.close()


@attrs.frozen(eq=False)
class SchedulerClient:
    """Rows that come together."""

    serving: Serving
    watch: StepWatch
    clock: Clock

    @property
    def model(self) -> LoadedModel:
        return self.serving.model

    def run(self, prompts: Sequence[np.ndarray], params: SamplingParams) -> Ran:
        scheduler = self.serving.scheduler
        requests = [Request((spec,), cache_prompt=False) for spec in _specs(self.model, prompts, params)]
        self.watch.begin(prompts)
        handed = self.clock()
        # Between two ticks, so that all of them are there at the next: a run has the same steps whenever it is made.
        replies = scheduler.call(lambda: [scheduler.submit(request) for request in requests])
        ended = [result for reply in replies for result in reply.results()]
        return Ran(handed, tuple(_whole(result, params) for result in ended))

    def close(self) -> None:
        self.serving.close()


def open_client(
    path: Path,
    chosen: ChosenModel,
    config: EngineConfig,
    manager: PluginManager,
    progress: Progress,
    *,
    rows: int,
    kept: KeptWeights,
    say: Callable[[str], None],
    clock: Clock,
) -> Client:
    """With the model loaded, and no program compiled yet: a cell compiles its own when it is warmed up. No prompt is
    cached. The scheduler has the rows that `serve` would have, or `rows` where that are more and nobody says how many;
    UsageError where it cannot have them."""
    watch = StepWatch(clock)
    config = attrs.evolve(config, enable_prefix_caching=False, no_warmup=True)
    if path == "direct":
        model = chosen.load(config, manager, progress, kept=kept, say=say)
        model.observers.add(watch)
        return DirectClient(model, watch, clock, run_ahead=not config.force_sync)
    if config.max_num_seqs is None and rows > Rows.of(config, choose_backend(config, manager).backend.caps).most:
        config = attrs.evolve(config, max_num_seqs=rows)
    serving = chosen.serve(config, manager, progress, max_queue_depth=rows, kept=kept, say=say)
    serving.model.observers.add(watch)
    try:
        slots = serving.model.engine.settings.slots
        if slots < rows:
            raise UsageError(
                f"--batch {rows}: the scheduler has {slots} rows here",
                hint=f"--parallel {rows} asks for as many; a smaller --ctx-size lets more of them fit",
            )
    except BaseException:
        serving.close()
        raise
    return SchedulerClient(serving, watch, clock)


def _specs(model: LoadedModel, prompts: Sequence[np.ndarray], params: SamplingParams) -> list[SequenceSpec]:
    return [
        sequence_spec(
            model,
            Prompt(tuple(int(token) for token in prompt)),
            params,
            request_id=f"row {place}",
            caps=Caps(),
        )
        for place, prompt in enumerate(prompts)
    ]


def _whole(result: RequestResult, params: SamplingParams) -> str:
    """The cause of its end. MlxcelError where it is short: that would be another measurement."""
    if result.cause == "cancelled":
        raise KeyboardInterrupt  # nobody else cancels
    if result.error is not None:
        raise result.error
    if len(result.token_ids) != params.max_tokens:
        raise MlxcelError(
            f"{result.request_id} ended after {len(result.token_ids)} of {params.max_tokens} tokens: {result.cause}",
            hint="the figures of a shorter reply are not those that were asked for; -vv shows what ended it",
        )
    return result.cause
