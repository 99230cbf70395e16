"""Which plugins and commands are installed: entry points of distributions, read and not imported."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from importlib import metadata
from typing import Any

import attrs

from mlxcel.errors import PluginError

OWN = "mlxcel"
"""Our own distribution. Its plugins are found as every other's are; no limit leaves them out."""

GROUP = "mlxcel"
"""Entry-point group of plugins."""

COMMANDS_GROUP = "mlxcel.commands"
"""Entry-point group of commands, which are no hook."""


@attrs.frozen
class EntryPoint:
    """An entry point and the distribution it belongs to (by its normalised name)."""

    name: str
    target: str
    distribution: str
    version: str

    @property
    def label(self) -> str:
        """For messages: "my-family (mlxcel-family-example 1.0)"."""
        return f"{self.name} ({self.distribution} {self.version})"

    def load(self) -> Any:
        """Import what it names: a module, or an attribute of one."""
        return metadata.EntryPoint(self.name, self.target, GROUP).load()


def normalise(distribution: str) -> str:
    """The one spelling of a distribution's name. https://peps.python.org/pep-0503/#normalized-names"""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def entry_points(group: str, only: Collection[str] | None) -> list[EntryPoint]:
    """Entry points of a group: our own first, then distributions by name; within one, in the order it declares.

    `only` limits the third parties to these distributions. PluginError when one of them is not installed, or has
    neither plugins nor commands.
    """
    found = _installed(group)
    if only is None:
        return found
    wanted = {normalise(name) for name in only if name.strip()}
    offering = {entry.distribution for entry in (*_installed(GROUP), *_installed(COMMANDS_GROUP))}
    if lacking := sorted(wanted - offering):
        raise _not_there(lacking, sorted(offering - {OWN}))
    return [entry for entry in found if entry.distribution == OWN or entry.distribution in wanted]


def command_clashes(found: Iterable[EntryPoint], built_in: Collection[str]) -> list[str]:
    """A sentence for each command whose name is taken."""
    owners = dict.fromkeys(built_in, f"the built-in command of {OWN}")
    clashes = []
    for entry in found:
        if entry.name in owners:
            owner = f"{entry.distribution} {entry.version}"
            clashes.append(f"the command {entry.name!r} of {owner} has the name of {owners[entry.name]}")
        owners.setdefault(entry.name, f"the command of {entry.distribution} {entry.version}")
    return clashes


def _installed(group: str) -> list[EntryPoint]:
    """One entry a distribution and name, even where an interrupted uninstallation left a second copy of its metadata,
    or one without a name in it."""
    found: list[EntryPoint] = []
    owners: dict[str, metadata.Distribution] = {}
    for entry in metadata.entry_points(group=group):
        if entry.dist is None or "Name" not in entry.dist.metadata:
            continue
        distribution = normalise(entry.dist.name)
        if owners.setdefault(distribution, entry.dist) is entry.dist:
            found.append(EntryPoint(entry.name, entry.value, distribution, entry.dist.version))
    return sorted(found, key=lambda entry: (entry.distribution != OWN, entry.distribution))


def _not_there(lacking: list[str], offering: list[str]) -> PluginError:
    near = [match for name in lacking for match in get_close_matches(name, offering, n=2, cutoff=0.5)]
    known = f"did you mean {' or '.join(near)}?" if near else f"those that have: {', '.join(offering) or 'none'}"
    return PluginError(
        f"MLXCEL_PLUGINS names {', '.join(lacking)}: no installed distribution of that name has mlxcel plugins",
        hint=f"{known}; an empty MLXCEL_PLUGINS means the built-in ones alone",
    )
