"""A backend that emits given token ids: the cheapest way to meet text, finish and fault cases exactly.

It runs through the whole engine: the script becomes logits, the engine's own sampler draws from them, and everything
behind the draw is the real thing. For tests of clients too: docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core import score
from mlxcel.core.backend import BackendCaps, Level
from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.engine import Engine
from mlxcel.core.family import ModelFamily
from mlxcel.core.finish import FinishStep
from mlxcel.core.kv import FullKV, KVLayout, KVSpec, KVStore
from mlxcel.core.observe import Observer, Observers
from mlxcel.core.plan import StepPlan, StepResult
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry, LogitsProcessor, Sampler
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import Progress
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.clock import ManualClock
from mlxcel.testing.faults import FaultPlan
from mlxcel.text.echo import reply_stream

CERTAIN = 60.0
"""Logit of the scripted token, the others being 0: beyond what Gumbel noise (range -2.81 … 22.87) can overcome."""

RUN_ROWS = 4
"""Most rows of a run, where there are runs: fewer than most engines have, so that tests meet both."""

SCRIPTED_KV = KVSpec((FullKV(kv_heads=1, k_dim=1, v_dim=1),))

Scripts = Mapping[str, Sequence[int]] | Callable[[SequenceSpec], Sequence[int]]
"""The ids of each row: by its request id, or made from its spec when it is opened."""


class ScriptedBackend:
    """A row draws the first id of its script, then the second …, whatever is fed. A row without a script is not opened
    (KeyError); a step behind its last id fails. Where positions of a prompt are scored, each is certain of the token
    behind it; `Engine.score` needs no script.

    `steps` counts the forwards that were started, `tokens` the tokens they were given. `delay` seconds pass on `clock`
    when a step is read. With `decode_run` it takes so many steps of up to RUN_ROWS rows together. Without `vocab` the V
    of the model that is loaded counts.
    """

    def __init__(
        self,
        scripts: Scripts,
        *,
        vocab: int = 0,
        clock: ManualClock | None = None,
        delay: float = 0.0,
        level: Level = "R2",
        mixed_steps: bool = True,
        decode_run: int = 1,
    ) -> None:
        self._scripts = scripts
        self._vocab = vocab
        self._clock = clock or ManualClock()
        self._delay = delay
        self._rows: dict[int, tuple[SequenceSpec, Sequence[int]]] = {}  # by slot, with the script
        self._last = np.zeros(0, np.int32)
        self._observed = np.zeros(0, np.float32)
        self._sampler: Sampler | None = None
        self.steps = 0
        self.tokens = 0
        self.closed = False
        self._caps = BackendCaps(
            level=level,
            platform="cpu",
            device="script",
            dtype="float32",
            page_sizes=(16, 32, 64, 128),
            run_ahead=True,
            mixed_steps=mixed_steps,
            decode_runs=((RUN_ROWS, decode_run),) if decode_run > 1 else (),
        )

    @property
    def caps(self) -> BackendCaps:
        return self._caps

    @property
    def weight_bytes(self) -> int:
        return 0

    def memory(self) -> None:
        """A script lies in the host's memory."""

    def load(self, family: ModelFamily, config: Any, checkpoint: Checkpoint, progress: Progress) -> None:
        """A script has no weights."""
        self._vocab = self._vocab or config.vocab_size

    def start(self, layout: KVLayout, sampler: Sampler) -> None:
        self._sampler = sampler
        self._last = np.zeros(layout.slots, np.int32)
        self._observed = np.zeros(layout.slots, np.float32)

    def open(self, slot: int, spec: SequenceSpec) -> None:
        self._rows[slot] = (spec, self._script(spec))

    def _script(self, spec: SequenceSpec) -> Sequence[int]:
        if spec.request_id == score.REQUEST_ID:
            return ()
        if callable(self._scripts):
            return self._scripts(spec)
        if spec.request_id not in self._scripts:
            raise KeyError(f"no script for request {spec.request_id!r}: there are {sorted(self._scripts)}")
        return self._scripts[spec.request_id]

    def release(self, slot: int) -> None:
        del self._rows[slot]

    def submit(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        self.tokens += plan.num_tokens
        if self._sampler is None:
            raise RuntimeError("start() was not called")
        logits = np.zeros((len(plan.draw_rows), self._vocab), np.float32)
        for place, row in enumerate(plan.draw_rows):
            spec, script = self._rows[int(plan.slots[row])]
            index = int(plan.positions[plan.logits_rows[place]]) + 1 - len(spec.prompt_ids)
            if index < 0:  # a position of the prompt that is scored
                logits[place, spec.prompt_ids[index]] = CERTAIN
                continue
            if index >= len(script):
                raise IndexError(f"the script of {spec.request_id!r} ends after {len(script)} tokens")
            logits[place, script[index]] = CERTAIN
        slots = plan.slots[plan.draw_rows]
        carry = Carry(self._last[slots], self._observed[slots])
        drawn = self._sampler.draw(np, logits, plan.sampling, carry)
        self._last[slots] = drawn.tokens
        if drawn.observed is not None:
            self._observed[slots] = drawn.observed
        return StepResult(*drawn, {"script": plan.num_rows})

    def submit_run(self, plans: Sequence[StepPlan]) -> list[StepResult | Exception]:
        """One after the other; behind one that fails, all fail."""
        handles: list[StepResult | Exception] = []
        for plan in plans:
            failed = bool(handles) and isinstance(handles[-1], Exception)
            try:
                handles.append(handles[-1] if failed else self.submit(plan))
            except Exception as error:
                handles.append(error)
        return handles

    def export_state(self, slot: int) -> tuple[Sequence[np.ndarray], int]:
        """A script keeps no rings."""
        return (), 0

    def import_state(self, slot: int, state: Sequence[np.ndarray]) -> None:
        """A script keeps no rings."""

    def export_pages(self, pages: Sequence[int]) -> list[np.ndarray]:
        """A script keeps no KV."""
        return []

    def import_pages(self, pages: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """A script keeps no KV."""

    def read(self, handle: StepResult | Exception) -> StepResult:
        self._clock.advance(self._delay)
        if isinstance(handle, Exception):
            raise handle
        return handle

    def close(self) -> None:
        self.closed = True


@attrs.frozen
class ScriptedEngine:
    """An engine over a script, with what a test wants to look at."""

    engine: Engine
    backend: ScriptedBackend
    kv: KVStore
    clock: ManualClock
    faults: FaultPlan
    observers: Observers


def scripted_engine(
    scripts: Scripts,
    *,
    tokenizer: Tokenizer,
    vocab: int | None = None,
    context: int = 256,
    slots: int = 8,
    delay: float = 0.0,
    level: Level = "R2",
    mixed_steps: bool = True,
    decode_run: int = 1,
    max_consecutive_faults: int = 8,
    faults: FaultPlan | None = None,
    finish_steps: Mapping[str, FinishStep] | None = None,
    processors: Mapping[str, LogitsProcessor] | None = None,
    observers: Sequence[Observer] = (),
    kv_store: Callable[..., KVStore] = DenseKV,
    page_size: int = 16,
    pages: int | None = None,
) -> ScriptedEngine:
    """The real engine, KV store, sampler and finish step around a ScriptedBackend; `faults` wraps each of them. V is
    `vocab`, or the tokenizer's size."""
    clock = ManualClock()
    vocab = vocab or tokenizer.size
    plan = faults or FaultPlan(())
    plan.clock = clock
    backend = ScriptedBackend(
        scripts,
        vocab=vocab,
        clock=clock,
        delay=delay,
        level=level,
        mixed_steps=mixed_steps,
        decode_run=decode_run,
    )
    kv = kv_store(kv_spec=SCRIPTED_KV, slots=slots, context=context, page_size=page_size, pages=pages)
    finish = StandardFinish(
        stream=plan.stream(lambda spec: reply_stream(tokenizer, spec)),
        steps=finish_steps or {},
        clock=clock,
    )
    watching = Observers(plan.observers(observers))
    engine = Engine(
        backend=plan.backend(backend),
        kv_spec=SCRIPTED_KV,
        kv=plan.kv(kv),
        sampler=plan.sampler(ChainSampler(vocab=vocab, tokenizer=tokenizer, processors=processors)),
        finish=plan.finish(finish),
        settings=EngineSettings(
            vocab=vocab, context=context, slots=slots, max_consecutive_faults=max_consecutive_faults
        ),
        observers=watching,
    )
    return ScriptedEngine(engine, backend, kv, clock, plan, watching)
