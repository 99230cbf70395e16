"""What plugins registered, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

import attrs

from mlxcel.errors import MlxcelError, PluginError, UsageError
from mlxcel.plugins.discovery import EntryPoint
from mlxcel.plugins.kinds import Kind

T = TypeVar("T")


@attrs.frozen
class PluginInfo:
    """A plugin as `mlxcel plugins` shows it. `names` maps each hook to what it registered; `error` says what failed."""

    distribution: str
    version: str
    entry_point: str
    hooks: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    error: str | None


@attrs.frozen
class Offer(Generic[T]):
    """One item and the plugin that registered it."""

    name: str
    item: T
    plugin: EntryPoint


@attrs.frozen
class Failure:
    """A plugin that could not be asked for this kind, and why."""

    plugin: EntryPoint
    reason: str

    def __str__(self) -> str:
        return f"{self.plugin.label} failed: {self.reason}"


class Registry(Mapping[str, T]):
    """Items of one kind by name, in registered order. Each knows its plugin; so does what failed."""

    def __init__(self, kind: Kind, offers: Sequence[Offer[T]], failures: Sequence[Failure]) -> None:
        """Raises PluginError for a name that is registered twice, naming both plugins."""
        if found := clashes(kind, offers):
            raise PluginError(found[0], hint="uninstall one of them, or leave one out with MLXCEL_PLUGINS")
        self.kind = kind
        self.failures = tuple(failures)
        self._offers = {offer.name: offer for offer in offers}

    def __getitem__(self, name: str) -> T:
        return self._offers[name].item

    def __iter__(self) -> Iterator[str]:
        return iter(self._offers)

    def __len__(self) -> int:
        return len(self._offers)

    def plugin(self, name: str) -> EntryPoint:
        """The plugin that registered this name."""
        return self._offers[name].plugin

    def choose(self, name: str) -> T:
        """The item of this name. UsageError lists the names there are; PluginError when a failed plugin may have it."""
        if name in self._offers:
            return self[name]
        message = f"no {self.kind.word} is called {name!r}"
        hint = f"{near(name, list(self))}; a plugin adds one with the hook {self.kind.hook}"
        if self.failures:
            raise PluginError(f"{message}; {self.failed()}", hint=hint)
        raise UsageError(message, hint=hint)

    def load(self, name: str) -> Any:
        """What the lazy target of this name's spec gives. PluginError names the plugin when its import fails."""
        spec: Any = self.choose(name)
        try:
            return spec.load()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"the {self.kind.word} {name!r} of {self.plugin(name).label} cannot be imported: {reason(error)}",
                hint=f"its target is {spec.target!r}; update or uninstall {self.plugin(name).distribution}",
            ) from error

    def maker(self, name: str, product: Any) -> Callable[..., Any]:
        """The factory of this name, imported now. `product` is the runtime-checkable protocol of what it must make.

        The factory raises PluginError, naming the plugin, for what the plugin's own raises or makes amiss.
        """
        factory = self.load(name)
        owner = f"the {self.kind.word} {name!r} of {self.plugin(name).label}"
        hint = f"update or uninstall {self.plugin(name).distribution}"

        def make(**options: Any) -> Any:
            try:
                made = factory(**options)
            except MlxcelError:
                raise
            except (Exception, SystemExit) as error:
                raise PluginError(f"{owner} cannot be made: {reason(error)}", hint=hint) from error
            if not isinstance(made, product):
                raise PluginError(f"{owner} makes a {type(made).__name__}, not a {product.__name__}", hint=hint)
            return made

        return make

    def failed(self) -> str:
        """The failures as text, "" without any."""
        return "; ".join(f"the plugin {failure}" for failure in self.failures)


def clashes(kind: Kind, offers: Sequence[Offer[Any]]) -> list[str]:
    """A sentence for each name, or architecture of a family, that two plugins have registered."""
    owners: dict[tuple[str, str], Offer[Any]] = {}
    found = []
    for offer in offers:
        for what, value in [(kind.word, offer.name), *_claims(offer.item)]:
            other = owners.setdefault((what, value), offer)
            if other is not offer:
                found.append(f"the {what} {value!r} is registered twice: {_owner(other, what)}, {_owner(offer, what)}")
    return found


def near(name: str, known: Sequence[str]) -> str:
    """The known names, those that look like `name` first."""
    matches = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(matches)}? " if matches else ""
    return f"{guess}known: {', '.join(known) or 'none'}"


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _claims(item: Any) -> list[tuple[str, str]]:
    types = [("model_type", value) for value in getattr(item, "model_types", ())]
    return types + [("GGUF architecture", value) for value in getattr(item, "gguf_archs", ())]


def _owner(offer: Offer[Any], what: str) -> str:
    claimed = what in ("model_type", "GGUF architecture")
    return f"by {offer.name!r} of {offer.plugin.label}" if claimed else f"by {offer.plugin.label}"
