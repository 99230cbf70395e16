"""What a command gets as `ctx.obj`: the options that were given, and what is made of them when it is asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.cli.streams import tell
from mlxcel.core.source import NoProgress
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.cli.progress import BarProgress, LineProgress
    from mlxcel.config import EngineConfig
    from mlxcel.core.source import Progress
    from mlxcel.options import Option
    from mlxcel.plugins.manager import PluginManager


@attrs.define(slots=False)
class CliContext:
    """One run of the program. `given` holds explicit values by keyword, with the words that gave each.

    A command with a scheduler sets `scheduler` before it asks for the configuration, and `one_row` if it has one row.
    """

    verbosity: int = 0
    quiet: bool = False
    config_file: str | None = None
    scheduler: bool = False
    one_row: bool = False
    given: dict[str, tuple[Any, str]] = attrs.field(factory=dict)
    _told: list[BarProgress | LineProgress] = attrs.field(factory=list, init=False)

    def give(self, option: Option, value: Any, words: str) -> None:
        """Note a value. UsageError when the option has another one already; a repeatable one collects."""
        if option.repeatable:
            before = self.given.get(option.name, ((), words))[0]
            self.given[option.name] = ((*before, *value), words)
            return
        before, first = self.given.setdefault(option.name, (value, words))
        if before != value:
            twice = f"{words} is given twice" if first == words else f"{first} and {words} differ"
            raise UsageError(f"{twice}: {before!r} and {value!r}", hint="give it once")

    def louder(self, count: int) -> None:
        self.verbosity += count
        self._check_volume()

    def silence(self) -> None:
        self.quiet = True
        self._check_volume()

    def _check_volume(self) -> None:
        if self.quiet and self.verbosity:
            raise UsageError("-q and -v are both given", hint="leave one of them out")

    @cached_property
    def config(self) -> EngineConfig:
        """UsageError for a value that cannot be obeyed, wherever it comes from."""
        from mlxcel.config import EngineConfig

        values = {name: value for name, (value, _) in self.given.items()}
        return EngineConfig.resolve(
            values, config_file=self.config_file, scheduler=self.scheduler, one_row=self.one_row
        )

    @cached_property
    def _manager(self) -> PluginManager:
        from mlxcel.config import plugin_limit
        from mlxcel.plugins.manager import PluginManager

        only = plugin_limit(self.config.plugins)
        return PluginManager.load(only=only, trace=self._trace if self.config.trace_hooks else None)

    def plugins(self) -> PluginManager:
        return self._manager

    def progress(self) -> Progress:
        """Bars on a terminal, lines elsewhere, nothing with -q."""
        if self.quiet:
            return NoProgress()
        from mlxcel.cli.progress import console_progress

        told = console_progress(no_color=self.config.no_color)
        self._told.append(told)
        return told

    def drop_progress(self) -> None:
        """The command is over, however it ended; before anything is said of that."""
        for told in self._told:
            told.drop()

    def say(self, line: str) -> None:
        """A line for people, on stderr; not with -q."""
        if not self.quiet:
            tell(line)

    def _trace(self, line: str) -> None:
        tell(line)
