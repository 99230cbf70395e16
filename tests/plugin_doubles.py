"""Third-party distributions made of text, installed on a folder of sys.path as pip would install them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from mlxcel.plugins.manager import PluginManager

HEADER = """
from mlxcel.core.backend import BackendSpec
from mlxcel.core.checkpoint import FormatSpec
from mlxcel.core.family import FamilySpec
from mlxcel.core.named import Named
from mlxcel.core.source import ModelFile, ModelSource
from mlxcel.core.tokenizer import TokenizerSpec
from mlxcel.plugins.hookspecs import hookimpl
"""

EVERY_HOOK = (
    HEADER
    + """
@hookimpl
def mlxcel_backends():
    return [BackendSpec("abacus", "beads", f"{__name__}:Thing", priority=1, probe_target=f"{__name__}:probe")]

@hookimpl
def mlxcel_families():
    return [FamilySpec("parrot", "repeats", f"{__name__}:Thing", model_types=("parrot",), gguf_archs=("parrot",))]

@hookimpl
def mlxcel_formats():
    return [FormatSpec("papyrus", "a scroll", f"{__name__}:Thing", detect=f"{__name__}:probe")]

@hookimpl
def mlxcel_tokenizers():
    return [TokenizerSpec("letters", "one id a letter", f"{__name__}:Thing", needs="letters.txt")]

@hookimpl
def mlxcel_model_sources():
    return [ModelSource("polly", "a parrot", 3, "MIT", (ModelFile("polly.gguf", SHA),), f"{__name__}:fetch")]

@hookimpl
def mlxcel_kv_stores():
    return [Named("drawer", "keeps", f"{__name__}:Thing")]

@hookimpl
def mlxcel_prefill_planners():
    return [Named("whole", "one piece", f"{__name__}:Thing")]

@hookimpl
def mlxcel_samplers():
    return [Named("dice", "throws", f"{__name__}:Thing")]

@hookimpl
def mlxcel_logits_processors():
    return [Named("loud", "raises", f"{__name__}:Thing")]

@hookimpl
def mlxcel_finish_steps():
    return [Named("boredom", "ends", f"{__name__}:Thing")]

@hookimpl
def mlxcel_observers():
    return [Thing()]

@hookimpl
def mlxcel_routes(engine):
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def family(request):
        return JSONResponse({"family": engine.model.facts.family})

    return [Route("/my/family", family)]

class Thing:
    def step_finished(self, report): pass
    def request_finished(self, result): pass

def probe(device): pass

def fetch(target, progress):
    (target / "polly.gguf").write_bytes(b"abc")

SHA = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""
)


def family(name: str, *, types: str = "()", archs: str = "()") -> str:
    """A plugin with one family."""
    spec = f'FamilySpec("{name}", "", "a:B", model_types={types}, gguf_archs={archs})'
    return f"{HEADER}\n@hookimpl\ndef mlxcel_families():\n    return [{spec}]\n"


def sampler(name: str) -> str:
    """A plugin with one sampler."""
    return f"{HEADER}\n@hookimpl\ndef mlxcel_samplers():\n    return [Named('{name}', '', 'a:B')]\n"


def samplers(answer: str) -> str:
    """A plugin whose sampler hook runs the statement `answer`, and whose KV store "drawer" is sound."""
    stores = "@hookimpl\ndef mlxcel_kv_stores():\n    return [Named('drawer', '', 'a:B')]\n"
    return f"{HEADER}\n@hookimpl\ndef mlxcel_samplers():\n    {answer}\n\n{stores}"


@attrs.frozen
class Installer:
    """Installs distributions into `folder`, which is on sys.path of this process."""

    folder: Path

    def install(
        self,
        name: str,
        plugin: str | None = None,
        *,
        version: str = "1.0",
        entry_point: str | None = None,
        commands: dict[str, str] | None = None,
    ) -> str:
        """A distribution whose one module holds `plugin`. Returns the module's name."""
        module = name.lower().replace("-", "_").replace(".", "_") + "_plugin"
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines: list[str] = []
        if plugin is not None:
            (self.folder / f"{module}.py").write_text(plugin)
            lines += ["[mlxcel]", f"{entry_point or name} = {module}"]
        if commands is not None:
            lines += ["[mlxcel.commands]", *(f"{command} = {target}" for command, target in commands.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        return module


def load(only: tuple[str, ...] | None = None, trace: Callable[[str], None] | None = None) -> PluginManager:
    return PluginManager.load(only=only, trace=trace)
