"""`mlxcel engine-parity`: do two ways of running the same request give the same tokens, and where do they part?

docs/spec/clients.md chapter 5. It drives the engine and the scheduler that clients use; there is no loop of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.tools.model_choice import chosen_model
from mlxcel.tools.parity.early import AskedPrompt, Backends, prepare, require_deterministic
from mlxcel.tools.parity.options import GROUPS, ParityOptions
from mlxcel.tools.parity.run import Report, run_parity
from mlxcel.tools.parity.setup import Setup

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager


@attrs.frozen(eq=False)
class Compared:
    """What was found, and the tokenizer to print it with."""

    report: Report
    tokenizer: Tokenizer


def engine_parity(
    config: EngineConfig,
    manager: PluginManager,
    progress: Progress,
    options: ParityOptions,
    asked: AskedPrompt,
    *,
    random_weights: str | None = None,
    weights_seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Compared:
    """Refuse what cannot be compared, then run every arm. Raises the errors of mlxcel/errors.py."""
    require_deterministic(config)
    model = chosen_model(config, manager, random_weights=random_weights, weights_seed=weights_seed)
    backends = Backends.here(config, manager, options.other_backend)
    groups = options.groups or tuple(each for each in GROUPS if each != "backend" or _wanted(backends, options))
    prepared = prepare(model, config, manager, progress, say, options, asked, groups, backends.level)
    setup = Setup(model, config, manager, progress, say, options, prepared.prompt)
    report = run_parity(setup, groups, backends.other, options.other_backend or "none")
    return Compared(report, prepared.tokenizer)


def _wanted(backends: Backends, options: ParityOptions) -> bool:
    """Whether a second backend is there, or somebody asks for it."""
    return backends.other is not None or options.other_backend is not None or "backend" in options.require
