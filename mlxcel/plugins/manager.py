"""Finds plugins, asks each of them for what it offers, and keeps the answers by name.

Built-in plugins are entry points of our own distribution and pass through here as every other does. A plugin that
fails, fails alone: it is recorded, and named in the error of whatever would have needed it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from mlxcel.core.backend import BackendSpec
from mlxcel.core.checkpoint import FormatSpec
from mlxcel.core.family import FamilySpec
from mlxcel.core.named import Named
from mlxcel.core.observe import Observer
from mlxcel.core.source import ModelSource
from mlxcel.core.tokenizer import TokenizerSpec
from mlxcel.errors import CheckpointError, PluginError
from mlxcel.plugins import discovery, hookspecs, kinds
from mlxcel.plugins.discovery import GROUP, OWN, EntryPoint
from mlxcel.plugins.kinds import KINDS, Kind
from mlxcel.plugins.registry import Failure, Offer, PluginInfo, Registry, clashes, near, reason

if TYPE_CHECKING:
    from starlette.routing import Route

    from mlxcel.serve_engine import Serving

_log = logging.getLogger("mlxcel.plugins")


@attrs.define(eq=False)
class _Plugin:
    """One entry point on its way. `error` is set when it could not be registered at all."""

    entry: EntryPoint
    module: Any = None
    hooks: tuple[str, ...] = ()
    error: str | None = None


@attrs.frozen
class _Answers:
    """What all plugins said to one hook."""

    offers: tuple[Offer[Any], ...]
    failures: tuple[Failure, ...]


class PluginManager:
    """The plugins of this process. `load` makes one; each hook is called when its registry is first asked for, once."""

    def __init__(
        self, entries: Collection[EntryPoint], *, only: Collection[str] | None, trace: Callable[[str], None] | None
    ) -> None:
        self._only = only
        self._trace = trace
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)
        self._plugins = [_Plugin(entry) for entry in entries]
        self._answers: dict[Kind, _Answers] = {}
        self._registries: dict[Kind, Registry[Any]] = {}
        for plugin in self._plugins:
            self._attempt(plugin, self._import)
        for plugin in reversed(self._plugins):  # pluggy calls last registered first
            if plugin.error is None:
                self._attempt(plugin, self._register)

    @classmethod
    def load(cls, *, only: Collection[str] | None, trace: Callable[[str], None] | None) -> PluginManager:
        """Import the installed plugins. `only` (MLXCEL_PLUGINS) names the third-party distributions to take, None all,
        () none; `trace` (MLXCEL_TRACE_HOOKS) gets a line for each call of a hook.

        PluginError when a distribution in `only` is not installed, or mlxcel itself is not.
        """
        entries = discovery.entry_points(GROUP, only)
        if not any(entry.distribution == OWN for entry in entries):
            raise PluginError(
                f"the distribution {OWN} is not installed, so that its own plugins cannot be found",
                hint="install it: `pip install .`, or `pip install -e .` to work on it",
            )
        return cls(entries, only=only, trace=trace)

    def backends(self) -> Registry[BackendSpec]:
        return self._registry(kinds.BACKENDS)

    def families(self) -> Registry[FamilySpec]:
        return self._registry(kinds.FAMILIES)

    def formats(self) -> Registry[FormatSpec]:
        return self._registry(kinds.FORMATS)

    def tokenizers(self) -> Registry[TokenizerSpec]:
        return self._registry(kinds.TOKENIZERS)

    def model_sources(self) -> Registry[ModelSource]:
        return self._registry(kinds.MODEL_SOURCES)

    def kv_stores(self) -> Registry[Named]:
        return self._registry(kinds.KV_STORES)

    def prefill_planners(self) -> Registry[Named]:
        return self._registry(kinds.PREFILL_PLANNERS)

    def samplers(self) -> Registry[Named]:
        return self._registry(kinds.SAMPLERS)

    def logits_processors(self) -> Registry[Named]:
        return self._registry(kinds.LOGITS_PROCESSORS)

    def finish_steps(self) -> Registry[Named]:
        return self._registry(kinds.FINISH_STEPS)

    def observers(self) -> Registry[Observer]:
        """Observers have no names of their own: they are called after their plugin and class."""
        return self._registry(kinds.OBSERVERS)

    def routes(self, engine: Serving) -> Registry[Route]:
        """Of a server that runs `engine`; they are called by what they answer, "GET /path"."""
        answers = self._call(kinds.ROUTES, engine=engine)
        return Registry(kinds.ROUTES, answers.offers, answers.failures)

    def family_for(self, naming: str, architecture: str) -> FamilySpec:
        """The family that claims a checkpoint's architecture under its naming ("hf", "gguf"). CheckpointError if none
        does, with the architectures that are known and the plugins that failed."""
        families = self.families()
        for family in families.values():
            if family.claims(naming, architecture):
                return family
        what = "model_type" if naming == "hf" else "GGUF architecture"
        known = [name for family in families.values() for name in _claimed(family, naming)]
        failed = f"; {families.failed()}" if families.failures else ""
        raise CheckpointError(
            f"no model family here is for the {what} {architecture!r}{failed}",
            hint=f"{near(architecture, known)}; a plugin adds one with the hook {kinds.FAMILIES.hook}: "
            "docs/write-a-family.md",
        )

    def infos(self) -> list[PluginInfo]:
        """Every plugin with all its hooks called, in the order of loading."""
        answers = {kind: self._ask(kind) for kind in KINDS}
        return [self._info(plugin, answers) for plugin in self._plugins]

    def clashes(self, *, built_in_commands: Collection[str]) -> list[str]:
        """A sentence for each name that is registered twice, commands included."""
        found = [sentence for kind in KINDS for sentence in clashes(kind, self._ask(kind).offers)]
        return found + discovery.command_clashes(self.command_entries(), built_in_commands)

    def command_entries(self) -> list[EntryPoint]:
        """Third-party commands as they are installed, clashes among them included."""
        return discovery.entry_points(discovery.COMMANDS_GROUP, self._only)

    def _attempt(self, plugin: _Plugin, work: Callable[[_Plugin], None]) -> None:
        try:
            work(plugin)
        except (Exception, SystemExit) as error:
            _log.debug("plugin %s failed", plugin.entry.label, exc_info=error)
            plugin.error = reason(error)

    def _import(self, plugin: _Plugin) -> None:
        plugin.module = plugin.entry.load()

    def _register(self, plugin: _Plugin) -> None:
        plugin.hooks = self._implemented(plugin.module)
        name = str(self._plugins.index(plugin))
        try:
            self._hooks.register(plugin.module, name=name)
        except Exception:
            if self._hooks.has_plugin(name):  # pluggy may stop half way
                self._hooks.unregister(name=name)
            raise

    def _implemented(self, module: Any) -> tuple[str, ...]:
        """Hooks that a plugin implements. PluginError for one there is not, or for one that is not marked."""
        known = [kind.hook for kind in KINDS]
        found = []
        for name in dir(module):
            options = self._hooks.parse_hookimpl_opts(module, name)
            if options is None:
                if name.startswith("mlxcel_") and inspect.isroutine(inspect.getattr_static(module, name)):
                    raise PluginError(f"{name} is not marked with @hookimpl")
                continue
            hook = options["specname"] or name
            if hook not in known:
                raise PluginError(f"there is no hook {hook}: {near(hook, known)}")
            if options["wrapper"] or options["hookwrapper"]:
                raise PluginError(f"{hook} is a wrapper: hooks register, and nothing wraps them")
            found.append(hook)
        return tuple(hook for hook in known if hook in found)

    def _registry(self, kind: Kind) -> Registry[Any]:
        if kind not in self._registries:
            answers = self._ask(kind)
            self._registries[kind] = Registry(kind, answers.offers, answers.failures)
        return self._registries[kind]

    def _ask(self, kind: Kind) -> _Answers:
        """What was said so far to a hook with arguments: nothing."""
        if kind.arguments:
            return _Answers((), ())
        if kind not in self._answers:
            self._answers[kind] = self._call(kind)
        return self._answers[kind]

    def _call(self, kind: Kind, **arguments: Any) -> _Answers:
        offers: list[Offer[Any]] = []
        failures = [Failure(plugin.entry, plugin.error) for plugin in self._plugins if plugin.error is not None]
        for implementation in reversed(getattr(self._hooks.hook, kind.hook).get_hookimpls()):
            plugin = self._plugins[int(implementation.plugin_name)]
            try:
                found = _checked(
                    kind, plugin.entry, implementation.function(*(arguments[name] for name in implementation.argnames))
                )
            except (Exception, SystemExit) as error:
                _log.debug("%s of plugin %s failed", kind.hook, plugin.entry.label, exc_info=error)
                failures.append(Failure(plugin.entry, f"{kind.hook}: {reason(error)}"))
                outcome = f"failed: {reason(error)}"
            else:
                offers += found
                outcome = ", ".join(offer.name for offer in found) or "nothing"
            if self._trace is not None:
                self._trace(f"{kind.hook}() of {plugin.entry.label} -> {outcome}")
        return _Answers(tuple(offers), tuple(failures))

    def _info(self, plugin: _Plugin, answers: Mapping[Kind, _Answers]) -> PluginInfo:
        names = {
            kind.hook: tuple(offer.name for offer in answers[kind].offers if offer.plugin is plugin.entry)
            for kind in KINDS
            if kind.hook in plugin.hooks
        }
        errors = dict.fromkeys(
            failure.reason for found in answers.values() for failure in found.failures if failure.plugin is plugin.entry
        )
        return PluginInfo(
            distribution=plugin.entry.distribution,
            version=plugin.entry.version,
            entry_point=plugin.entry.name,
            hooks=plugin.hooks,
            names=names,
            error="; ".join(errors) or None,
        )


def _checked(kind: Kind, plugin: EntryPoint, answer: Any) -> list[Offer[Any]]:
    """A hook's answer as offers. TypeError for anything but a list of what the hook is for."""
    if not isinstance(answer, list):
        raise TypeError(f"a list was expected, not {answer!r}")
    offers: list[Offer[Any]] = []
    for item in answer:
        if (fault := kind.fault(item)) is not None:
            raise TypeError(fault)
        offers.append(Offer(_name(kind, plugin, item, len(offers)), item, plugin))
    return offers


def _name(kind: Kind, plugin: EntryPoint, item: Any, index: int) -> str:
    if kind is kinds.OBSERVERS:
        return f"{plugin.distribution}/{plugin.name}/{index}:{type(item).__qualname__}"
    if kind is kinds.ROUTES:
        return " ".join([*sorted(item.methods or ()), item.path])
    return str(item.name)


def _claimed(family: FamilySpec, naming: str) -> tuple[str, ...]:
    return family.model_types if naming == "hf" else family.gguf_archs
