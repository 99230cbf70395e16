"""Plugins: found, asked, and kept by name (docs/design.md 4, docs/spec/clients.md 1.8, 1.10)."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import pytest
from plugin_doubles import EVERY_HOOK, Installer, family, load, sampler, samplers

from mlxcel.core.source import NoProgress
from mlxcel.errors import CheckpointError, PluginError, UsageError
from mlxcel.plugins import hookspecs
from mlxcel.plugins.kinds import KINDS
from mlxcel.plugins.manager import PluginManager
from mlxcel.plugins.registry import Registry
from mlxcel.resolve import resolve_model
from mlxcel.store import ModelStore


def hooks() -> dict[str, Any]:
    return {name: spec for name, spec in vars(hookspecs).items() if name.startswith("mlxcel_")}


# --- hooks: documented, tested, and heard ----------------------------------------------------------------------------


def test_every_hook_is_documented_with_its_exact_signature() -> None:
    page = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text()
    for name, spec in hooks().items():
        assert f"{name}{inspect.signature(spec)}" in page, f"docs/hooks.md: {name} is missing or its signature is stale"


def test_every_hook_has_a_kind_and_a_test() -> None:
    assert list(hooks()) == [kind.hook for kind in KINDS]
    for name in hooks():
        assert f"test_{name}" in globals(), f"no test is called test_{name}"


@pytest.fixture
def both(third_party: Installer) -> PluginManager:
    """The built-in plugins and one third party that implements every hook."""
    third_party.install("Every.Hook", EVERY_HOOK)
    manager = load()
    implemented = next(info.hooks for info in manager.infos() if info.distribution == "every-hook")
    assert implemented == tuple(hooks())
    return manager


def behind_built_ins(registry: Registry[Any], name: str) -> Any:
    """The item of a third party, which comes after all built-in ones and knows where it comes from."""
    assert list(registry)[-1] == name
    assert registry.plugin(name).label == "Every.Hook (every-hook 1.0)"
    assert all(registry.plugin(other).distribution == "mlxcel" for other in list(registry)[:-1])
    return registry[name]


def test_mlxcel_backends(both: PluginManager) -> None:
    assert behind_built_ins(both.backends(), "abacus").priority == 1
    assert {name: spec.priority for name, spec in both.backends().items()} == {
        "jax-cuda": 100,
        "reference-numpy": 10,
        "abacus": 1,
    }


def test_mlxcel_families(both: PluginManager) -> None:
    spec = behind_built_ins(both.families(), "parrot")
    assert both.family_for("hf", "parrot") is both.family_for("gguf", "parrot") is spec
    assert both.family_for("hf", "mlxcel-tiny").name == "tiny"
    assert both.family_for("gguf", "llama").name == both.family_for("hf", "llama").name == "llama"


def test_mlxcel_formats(both: PluginManager) -> None:
    assert behind_built_ins(both.formats(), "papyrus").detect == "every_hook_plugin:probe"
    assert list(both.formats())[:-1] == ["safetensors", "gguf"]


def test_mlxcel_tokenizers(both: PluginManager) -> None:
    assert behind_built_ins(both.tokenizers(), "letters").needs == "letters.txt"
    assert [(spec.needs, spec.priority) for spec in both.tokenizers().values()] == [
        ("tokenizer.json", 20),
        ("tokenizer.model", 15),
        ("gguf", 10),
        ("letters.txt", 0),
    ]


def test_mlxcel_model_sources(both: PluginManager, tmp_path: Path) -> None:
    """clients 1.10 test 10: a model that a plugin registers is fetched by it and verified."""
    source = behind_built_ins(both.model_sources(), "polly")
    store = ModelStore(tmp_path / "store")
    found = resolve_model("polly", sources=both.model_sources(), store=store, offline=False, progress=NoProgress())
    assert found.source == source.fetch == "every_hook_plugin:fetch"
    assert found.path.read_bytes() == b"abc"


def test_mlxcel_kv_stores(both: PluginManager) -> None:
    behind_built_ins(both.kv_stores(), "drawer")
    dense = inspect.signature(both.kv_stores().load("dense"))
    assert set(dense.parameters) == {"kv_spec", "slots", "context", "page_size", "pages"}


def test_mlxcel_prefill_planners(both: PluginManager) -> None:
    behind_built_ins(both.prefill_planners(), "whole")
    chunked = inspect.signature(both.prefill_planners().load("chunked"))
    assert set(chunked.parameters) == {"chunk", "level", "caps"}


def test_mlxcel_samplers(both: PluginManager) -> None:
    behind_built_ins(both.samplers(), "dice")
    chain = inspect.signature(both.samplers().load("chain"))
    assert set(chain.parameters) == {"vocab", "tokenizer", "processors"}


def test_mlxcel_logits_processors(both: PluginManager) -> None:
    """engine S48; tests/test_processors.py takes one from its distribution to a reply."""
    behind_built_ins(both.logits_processors(), "loud")
    assert both.logits_processors().load("loud").__name__ == "Thing"


def test_mlxcel_finish_steps(both: PluginManager) -> None:
    behind_built_ins(both.finish_steps(), "boredom")
    assert both.finish_steps().load("boredom").__name__ == "Thing"


def test_mlxcel_observers(both: PluginManager) -> None:
    assert type(behind_built_ins(both.observers(), "every-hook/Every.Hook/0:Thing")).__name__ == "Thing"


def test_mlxcel_routes(both: PluginManager) -> None:
    """tests/test_server_plugin_routes.py asks one over HTTP."""
    serving: Any = object()
    route = behind_built_ins(both.routes(serving), "GET HEAD /my/family")
    assert route.path == "/my/family"


def test_every_built_in_target_exists() -> None:
    """A lazy name is checked by nothing else until somebody needs it."""
    manager = load(only=())
    registries: list[Registry[Any]] = [
        manager.backends(), manager.families(), manager.formats(), manager.tokenizers(), manager.kv_stores(),
        manager.prefill_planners(), manager.samplers(),
    ]  # fmt: skip
    for registry in registries:
        assert registry, f"no built-in {registry.kind.word}"
        for name in registry:
            assert callable(registry.load(name))
    assert all(isinstance(spec.probe().available, bool) for spec in manager.backends().values())
    assert all(callable(source.load_fetch()) for source in manager.model_sources().values())
    for spec in manager.formats().values():
        assert attrs.evolve(spec, target=spec.detect).load()(Path(__file__)) is False


def test_asking_every_built_in_plugin_imports_nothing_heavy() -> None:
    heavy = ("jax", "numpy", "rich", "msgspec", "starlette", "hypercorn", "tokenizers", "safetensors", "jinja2")
    code = (
        "import sys; from mlxcel.plugins.manager import PluginManager\n"
        "manager = PluginManager.load(only=(), trace=None); manager.infos()\n"
        "[spec.probe() for spec in manager.backends().values()]\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- order and limits ------------------------------------------------------------------------------------------------


def test_distributions_come_in_the_order_of_their_names(third_party: Installer) -> None:
    for name in ("zebra", "Ape", "mole"):
        third_party.install(name, sampler(name))
    assert list(load().samplers()) == ["chain", "Ape", "mole", "zebra"]


def test_pluggy_order_marks_hold(third_party: Installer) -> None:
    early = sampler("early")
    third_party.install("zebra", early.replace("@hookimpl", "@hookimpl(tryfirst=True)"))
    assert list(load().samplers()) == ["early", "chain"]


def test_hooks_are_called_once_and_only_when_needed(third_party: Installer) -> None:
    third_party.install("counted", f"calls = []\n{samplers('calls.append(1); return []')}")
    manager = load()
    calls = sys.modules["counted_plugin"].calls
    assert calls == []
    assert manager.samplers() is manager.samplers()
    manager.infos()
    assert calls == [1]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (None, ["chain", "one", "two"]),
        ((), ["chain"]),
        (("two",), ["chain", "two"]),
        (("My-Plugin.one", "two"), ["chain", "one", "two"]),
        (("MY_PLUGIN__ONE", "mlxcel", ""), ["chain", "one"]),
    ],
)
def test_mlxcel_plugins_limits_what_loads(
    third_party: Installer,
    only: tuple[str, ...] | None,
    names: list[str],
) -> None:
    """design 4: a comma list of distributions, spelt in any way that names them; empty means the built-in ones."""
    for distribution, name in (("my.plugin-one", "one"), ("two", "two")):
        text = sampler(name)
        third_party.install(distribution, text)
    assert list(load(only).samplers()) == names
    imported = {"one": "my_plugin_one_plugin", "two": "two_plugin"}
    assert {name for name, module in imported.items() if module in sys.modules} == set(names) - {"chain"}


@pytest.mark.parametrize("name", ["abcent", "pluggy"])
def test_mlxcel_plugins_names_what_is_not_there(third_party: Installer, name: str) -> None:
    third_party.install("absent", samplers("return []"))
    with pytest.raises(PluginError, match=f"names {name}:") as caught:
        load(("absent", name))
    assert caught.value.exit_code == 2
    assert "absent" in str(caught.value.hint)


def test_trace_tells_every_call(third_party: Installer) -> None:
    third_party.install("broken", samplers("raise ValueError('no dice today')"))
    told: list[str] = []
    manager = load(trace=told.append)
    assert told == []
    manager.samplers()
    assert told == [
        f"mlxcel_samplers() of mlxcel-builtin (mlxcel {version('mlxcel')}) -> chain",
        "mlxcel_samplers() of broken (broken 1.0) -> failed: ValueError: no dice today",
    ]
    manager.samplers()
    manager.kv_stores()
    assert len(told) == 4


def test_what_an_interrupted_uninstallation_left_is_not_found_twice(third_party: Installer) -> None:
    third_party.install("mine", sampler("dice"))
    (third_party.folder / "~ine-1.0.dist-info").mkdir()
    for file in (third_party.folder / "mine-1.0.dist-info").iterdir():
        (third_party.folder / "~ine-1.0.dist-info" / file.name).write_text(file.read_text())
    nameless = third_party.folder / "~nother-1.0.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text("[mlxcel]\nother = mine_plugin\n")
    assert list(load().samplers()) == ["chain", "dice"]
    assert [info.error for info in load().infos() if info.distribution != "mlxcel"] == [None]


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_registered_twice_names_both_plugins(third_party: Installer) -> None:
    third_party.install("first", samplers("return [Named('dice', '', 'a:B')]").replace("drawer", "box"))
    third_party.install("second", samplers("return [Named('dice', '', 'c:D')]"), version="2.5")
    manager = load()
    expected = "the sampler 'dice' is registered twice: by first (first 1.0), by second (second 2.5)"
    with pytest.raises(PluginError) as caught:
        manager.samplers()
    assert caught.value.message == expected
    assert caught.value.exit_code == 2
    assert manager.clashes(built_in_commands=()) == [expected]
    assert list(manager.kv_stores()) == ["dense", "paged", "box", "drawer"]
    assert list(load(("second",)).samplers()) == ["chain", "dice"]


def test_a_built_in_name_cannot_be_taken(third_party: Installer) -> None:
    third_party.install("thief", samplers("return [Named('chain', '', 'a:B')]"))
    with pytest.raises(PluginError, match=r"by mlxcel-builtin \(mlxcel [^)]+\), by thief \(thief 1\.0\)"):
        load().samplers()


def test_one_plugin_that_registers_a_name_twice(third_party: Installer) -> None:
    third_party.install("double", samplers("return [Named('dice', '', 'a:B'), Named('dice', '', 'a:B')]"))
    with pytest.raises(PluginError, match=r"twice: by double \(double 1\.0\), by double"):
        load().samplers()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (family("parrot", types="('owl', 'llama')"), "model_type 'llama'"),
        (family("parrot", archs="('qwen3',)"), "GGUF architecture 'qwen3'"),
        (family("llama"), "model family 'llama'"),
    ],
)
def test_two_families_cannot_claim_one_architecture(third_party: Installer, text: str, what: str) -> None:
    third_party.install("claims", text)
    with pytest.raises(PluginError, match=f"the {what} is registered twice: by .*mlxcel-builtin.*, by .*claims"):
        load().families()


def test_a_model_type_and_a_gguf_architecture_are_two_things(third_party: Installer) -> None:
    third_party.install("claims", family("parrot", types="('parrot',)", archs="('owl',)"))
    manager = load()
    assert manager.family_for("hf", "parrot") is manager.family_for("gguf", "owl")
    with pytest.raises(CheckpointError, match="GGUF architecture 'parrot'"):
        manager.family_for("gguf", "parrot")


def test_an_unknown_name_lists_the_known_ones_and_how_to_add_one() -> None:
    manager = load(only=())
    with pytest.raises(UsageError, match="no backend is called 'Jax_cuda'") as caught:
        manager.backends().choose("Jax_cuda")
    assert caught.value.exit_code == 2
    assert caught.value.hint == (
        "did you mean jax-cuda? known: jax-cuda, reference-numpy; a plugin adds one with the hook mlxcel_backends"
    )
    with pytest.raises(CheckpointError, match="no model family here is for the model_type 'llame'") as refused:
        manager.family_for("hf", "llame")
    hint = str(refused.value.hint)
    assert hint.startswith("did you mean llama")
    assert "known: llama, mistral, mixtral, qwen2, " in hint
    assert "mlxcel-tiny; a plugin adds" in hint
