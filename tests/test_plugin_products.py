"""What third-party factories make, and how what they made behaves once it runs."""

from __future__ import annotations

from typing import Any

import pytest
from engine_rows import opened, run_to_end, scripted, spec
from plugin_doubles import HEADER, Installer, load

from mlxcel.core.finish import FinishStep
from mlxcel.core.kv import KVStore
from mlxcel.core.piecework import Planner
from mlxcel.core.sampling import LogitsProcessor, Sampler
from mlxcel.errors import PluginError, RowFault, UsageError
from mlxcel.plugins.registry import Registry
from mlxcel.testing.byte_tokenizer import EOS

HOOKS = {
    "mlxcel_kv_stores": ("kv_stores", KVStore, "KV store"),
    "mlxcel_prefill_planners": ("prefill_planners", Planner, "prefill planner"),
    "mlxcel_samplers": ("samplers", Sampler, "sampler"),
    "mlxcel_logits_processors": ("logits_processors", LogitsProcessor, "logits processor"),
    "mlxcel_finish_steps": ("finish_steps", FinishStep, "finish step"),
}

FACTORIES = {
    "raises": ("def make(**options):\n    raise ValueError('boom')", "cannot be made: ValueError: boom"),
    "exits": ("def make(**options):\n    raise SystemExit(3)", "cannot be made: SystemExit: 3"),
    "takes nothing": ("def make(*, odd):\n    pass", "cannot be made: TypeError"),
    "makes nothing": ("def make(**options):\n    pass", "makes a NoneType, not a "),
    "makes half of it": (
        "class make:\n    name = 'half'\n    def __init__(self, **options):\n        pass",
        "makes a make, not a ",
    ),
}


def registry(third_party: Installer, hook: str, body: str) -> Registry[Any]:
    """The plugins of a hook, of which the distribution "odd" offers the factory `make` of `body` as "thing"."""
    offer = f"@hookimpl\ndef {hook}():\n    return [Named('thing', '', f'{{__name__}}:make')]"
    third_party.install("odd", f"{HEADER}\n{offer}\n{body}\n")
    found: Registry[Any] = getattr(load(), HOOKS[hook][0])()
    return found


@pytest.mark.parametrize("how", FACTORIES)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_factory_that_makes_nothing_usable_names_its_plugin(third_party: Installer, hook: str, how: str) -> None:
    body, expected = FACTORIES[how]
    _, product, word = HOOKS[hook]
    make = registry(third_party, hook, body).maker("thing", product)
    with pytest.raises(PluginError, match=rf"the {word} 'thing' of odd \(odd 1\.0\)") as caught:
        make(chunk=1)
    assert expected in caught.value.message
    assert caught.value.hint == "update or uninstall odd"


def test_what_a_factory_refuses_itself_reaches_the_user_as_it_is() -> None:
    make = load().prefill_planners().maker("chunked", Planner)
    with pytest.raises(UsageError, match="the prefill chunk must be 1 token or more"):
        make(chunk=0, level="R2", caps=None)


def step(third_party: Installer, open_row: str, check: str) -> FinishStep:
    """A third-party finish step whose two methods run these statements."""
    body = f"class make:\n    def open(self, spec):\n        {open_row}\n    def check(self, state, output, text):\n"
    found = registry(third_party, "mlxcel_finish_steps", f"{body}        {check}")
    made: FinishStep = found.maker("thing", FinishStep)()
    return made


SCRIPTS = {"a": [*b"hi", EOS]}


def test_a_finish_step_that_raises_fails_its_row(third_party: Installer) -> None:
    """Spec 1.3: an exception behind the forward fails this row alone, and the engine goes on."""
    it = scripted(SCRIPTS, finish_steps={"thing": step(third_party, "return spec.request_id", "1 / 0")})
    row, plan = opened(it.engine, "a")
    error = it.engine.prefill(row, plan).error
    assert isinstance(error, RowFault)
    assert "ZeroDivisionError" in str(error)
    assert it.engine.view(row).output == ()
    assert it.engine.healthy
    assert it.engine.close(row)
    assert it.kv.stats().owned == 0


def test_a_finish_step_that_cannot_open_refuses_the_row_and_leaks_nothing(third_party: Installer) -> None:
    it = scripted(SCRIPTS, finish_steps={"thing": step(third_party, "1 / 0", "pass")}, slots=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            it.engine.open(spec("a"))
    assert it.kv.stats().owned == 0


@pytest.mark.parametrize("answer", ["0", "''", "False", "[]"])
def test_every_answer_but_none_ends_the_row(third_party: Installer, answer: str) -> None:
    """Falsy details too."""
    it = scripted(SCRIPTS, finish_steps={"thing": step(third_party, "pass", f"return {answer}")})
    row, plan = opened(it.engine, "a")
    outcome = it.engine.prefill(row, plan)
    assert (outcome.cause, repr(outcome.detail)) == ("thing", answer)


@pytest.mark.parametrize("fault", ["raise ValueError", "raise SystemExit(9)", "report.outcomes = None"])
def test_an_observer_cannot_end_what_it_watches(third_party: Installer, fault: str) -> None:
    """Spec E16."""
    body = f"class Watch:\n    def step_finished(self, report):\n        {fault}\n    request_finished = step_finished"
    third_party.install("odd", f"{HEADER}\n{body}\n@hookimpl\ndef mlxcel_observers():\n    return [Watch()]\n")
    it = scripted(SCRIPTS, observers=tuple(load().observers().values()))
    row, plan = opened(it.engine, "a")
    assert run_to_end(it.engine, row, plan)[1] == "hi"
    assert sum(it.observers.failures.values()) == 3
