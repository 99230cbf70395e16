"""A plugin that fails, fails alone, and is named by whatever needs what it may have had (docs/spec/clients.md 1.10)."""

from __future__ import annotations

import pytest
from plugin_doubles import EVERY_HOOK, HEADER, Installer, family, load, samplers

from mlxcel.errors import CheckpointError, PluginError, UsageError

WHOLE_PLUGIN = {
    "raises on import": ("raise RuntimeError('broken inside\\nsecond line')", "RuntimeError: broken inside"),
    "exits on import": ("raise SystemExit(1)", "SystemExit: 1"),
    "does not parse": ("def (", "SyntaxError"),
    "lacks a module": ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
    "unknown hook": (
        f"{HEADER}\n@hookimpl\ndef mlxcel_sampler():\n    return []",
        "there is no hook mlxcel_sampler: did you mean mlxcel_samplers",
    ),
    "hook of a later version": (
        f"{HEADER}\n@hookimpl\ndef mlxcel_ballets(engine):\n    return []",
        "there is no hook mlxcel_ballets",
    ),
    "wrong argument": (f"{HEADER}\n@hookimpl\ndef mlxcel_samplers(config):\n    return []", "'mlxcel_samplers'"),
    "unmarked": (f"{HEADER}\ndef mlxcel_samplers():\n    return []", "mlxcel_samplers is not marked with @hookimpl"),
    "wrapper": (
        f"{HEADER}\n@hookimpl(wrapper=True)\ndef mlxcel_samplers():\n    return (yield)",
        "mlxcel_samplers is a wrapper",
    ),
}


@pytest.mark.parametrize("how", WHOLE_PLUGIN)
def test_a_plugin_that_cannot_be_registered_is_isolated(third_party: Installer, how: str) -> None:
    """clients 1.10 test 12. Whatever needs a name that only it may have is told about it."""
    text, expected = WHOLE_PLUGIN[how]
    third_party.install("broken", text)
    third_party.install("sound", family("parrot", types="('parrot',)"))
    manager = load()
    info = next(info for info in manager.infos() if info.distribution == "broken")
    assert expected in str(info.error)
    assert "\n" not in str(info.error)
    assert info.names == {} or info.names == {"mlxcel_samplers": ()}
    assert list(manager.samplers()) == ["chain"]
    assert manager.family_for("hf", "parrot").name == "parrot"
    assert [entry.error for entry in manager.infos() if entry is not info and entry.distribution != "broken"] == [
        None
    ] * 4
    with pytest.raises(
        PluginError, match=r"no sampler is called 'dice'; the plugin broken \(broken 1\.0\) failed"
    ) as caught:
        manager.samplers().choose("dice")
    assert expected in caught.value.message
    with pytest.raises(CheckpointError, match=r"'owl'; the plugin broken \(broken 1\.0\) failed"):
        manager.family_for("hf", "owl")


RUBBISH = {
    "raises": ("raise ValueError('boom')", "ValueError: boom"),
    "exits": ("raise SystemExit('bye')", "SystemExit: bye"),
    "nothing": ("return None", "a list was expected, not None"),
    "no list": ("return Named('dice', '', 'a:B')", "a list was expected, not Named"),
    "another spec": ("return [Named('dice', '', 'a:B'), 'dice']", "'dice' is no Named"),
    "no name": ("return [Named('', '', 'a:B')]", "the name ''"),
    "name is no text": ("return [Named(None, '', 'a:B')]", "the name None"),
    "name with a blank": ("return [Named('two dice', '', 'a:B')]", "the name 'two dice'"),
    "name like an option": ("return [Named('--dice', '', 'a:B')]", "the name '--dice'"),
    "target without a name": ("return [Named('dice', '', 'package.module')]", "dice: target must be"),
    "target is the object": ("return [Named('dice', '', Named)]", "dice: target must be"),
}


@pytest.mark.parametrize("how", RUBBISH)
def test_a_hook_that_fails_takes_nothing_else_down(third_party: Installer, how: str) -> None:
    """Not even the other hooks of its own plugin, whichever is asked first."""
    text, expected = RUBBISH[how]
    third_party.install("broken", samplers(text))
    manager = load()
    assert list(manager.samplers()) == ["chain"]
    assert list(manager.kv_stores()) == ["dense", "paged", "drawer"]
    info = next(info for info in manager.infos() if info.distribution == "broken")
    assert info.error is not None
    assert info.error.startswith("mlxcel_samplers: ")
    assert expected in info.error
    assert info.names == {"mlxcel_samplers": (), "mlxcel_kv_stores": ("drawer",)}
    with pytest.raises(PluginError, match="the plugin broken") as caught:
        manager.samplers().load("dice")
    assert expected in caught.value.message
    with pytest.raises(UsageError, match="no KV store is called 'dice'"):
        manager.kv_stores().choose("dice")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (family("parrot", types="('parrot')"), "model_types must be a tuple of texts, not 'parrot'"),
        (family("parrot", archs="['parrot']"), "gguf_archs must be a tuple"),
        (EVERY_HOOK.replace("priority=1", "priority='1'"), "abacus: priority must be an int"),
        (EVERY_HOOK.replace('probe_target=f"{__name__}:probe"', "probe_target=None"), "abacus: probe_target must be"),
        (EVERY_HOOK.replace('detect=f"{__name__}:probe"', "detect=print"), "papyrus: detect must be"),
        (EVERY_HOOK.replace('f"{__name__}:fetch"', "'fetch'"), "polly: fetch must be"),
        (EVERY_HOOK.replace("return [Thing()]", "return [Thing]"), "is no observer object"),
        (
            EVERY_HOOK.replace("return [Thing()]", "return [None]"),
            "step_finished and request_finished cannot be called",
        ),
    ],
)
def test_a_spec_with_a_wrong_field_is_refused(third_party: Installer, text: str, expected: str) -> None:
    third_party.install("broken", text)
    error = next(info.error for info in load().infos() if info.distribution == "broken")
    assert expected in str(error)


def test_a_target_that_cannot_be_imported_names_its_plugin(third_party: Installer) -> None:
    third_party.install("broken", samplers("return [Named('dice', '', 'nowhere_at_all:Dice')]"))
    with pytest.raises(PluginError, match=r"the sampler 'dice' of broken \(broken 1\.0\) cannot be imported") as caught:
        load().samplers().load("dice")
    assert "No module named 'nowhere_at_all'" in caught.value.message
    assert "nowhere_at_all:Dice" in str(caught.value.hint)


def test_one_module_under_two_entry_points_is_registered_once(third_party: Installer) -> None:
    third_party.install("first", samplers("return [Named('dice', '', 'a:B')]"))
    info = third_party.folder / "second-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlxcel]\nsecond = first_plugin\n")
    manager = load()
    assert [bool(info.error) for info in manager.infos() if info.distribution != "mlxcel"].count(True) == 1
    assert list(manager.samplers()) == ["chain", "dice"]
