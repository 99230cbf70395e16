"""Runs an arm: an engine of its own, every case through the client that the arm is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from mlxcel.errors import DeviceError, UsageError
from mlxcel.load import LoadedModel
from mlxcel.tools.parity.arms import Arm
from mlxcel.tools.parity.direct import run_direct
from mlxcel.tools.parity.scheduled import run_scheduled
from mlxcel.tools.parity.setup import EngineFacts, Setup
from mlxcel.tools.parity.stream import Failed, Found, Missing, NotAvailable
from mlxcel.tools.parity.watch import RowWatch


@attrs.frozen
class ArmRun:
    """By case; `facts` are None where no engine was opened."""

    found: Mapping[str, Found]
    facts: EngineFacts | None = None


def run_arm(
    arm: Arm, setup: Setup, score: Mapping[str, Sequence[int]] | None = None, *, say: Callable[[str], None]
) -> ArmRun:
    """All cases of an arm, one after the other. What cannot be had here is Missing, what goes wrong Failed. `say` hears
    what is told while the engine is opened.

    `score` is for the pair of backends: the streams, by case, that this arm's backend scores; its own where there is
    none of a case; None: nothing is scored. Raises KeyboardInterrupt.
    """
    config = arm.config(setup.config)
    cases = setup.options.cases
    try:
        if arm.direct:
            kept = None if arm.other else setup.kept
            with setup.model.load(config, setup.manager, setup.progress, kept=kept, say=say) as model:
                watch = _watched(model)
                return ArmRun(
                    {case: _guarded(run_direct, setup, arm, model, watch, case, score) for case in cases},
                    EngineFacts.of(model),
                )
        depth = max(32, arm.crowd)
        serving = setup.model.serve(
            config, setup.manager, setup.progress, max_queue_depth=depth, kept=setup.kept, say=say
        )
        try:
            facts = EngineFacts.of(serving.model)
            if arm.crowd and serving.model.engine.settings.slots == 1:
                return ArmRun(dict.fromkeys(cases, Missing(NotAvailable.ONE_ROW_ONLY)), facts)
            watch = _watched(serving.model)
            return ArmRun({case: _guarded(run_scheduled, setup, arm, serving, watch, case) for case in cases}, facts)
        finally:
            serving.close()
    except UsageError as error:
        if not arm.store:
            raise
        return ArmRun(dict.fromkeys(cases, Missing(NotAvailable.STORAGE_REFUSED, str(error))))
    except DeviceError as error:
        if not arm.other:
            raise
        return ArmRun(dict.fromkeys(cases, Missing(NotAvailable.BACKEND_UNAVAILABLE, str(error))))


def _watched(model: LoadedModel) -> RowWatch:
    watch = RowWatch()
    model.observers.add(watch)
    return watch


def _guarded(run: Callable[..., Found], *arguments: object) -> Found:
    try:
        return run(*arguments)
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")
