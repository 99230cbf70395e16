"""Sampling parameters of `generate`, end to end (docs/spec/clients.md 0.1, 0.3, 1.6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli
from tiny_checkpoint import write_json, write_tiny_llama

from mlxcel.core.param_table import RULES
from mlxcel.core.params import SamplingParams

END = 40
"""An id that nothing but generation_config.json calls an end."""

FILE = {"eos_token_id": [1, END], "temperature": 0.6, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    write_json(folder / "generation_config.json", FILE)
    return folder


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    return Cli(monkeypatch, capfdbinary)


def reply(cli: Cli, model: Path, *arguments: object, **environ: str) -> dict[str, Any]:
    ran = cli("generate", model, "--raw", "-p", "hello", "--json", "-q", *arguments, **environ)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def refused(cli: Cli, model: Path, *arguments: object) -> str:
    ran = cli("generate", model, "--raw", "-p", "hello", "--json", "-q", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "Traceback" not in ran.err
    return ran.err


def test_every_value_is_reported_with_its_origin(cli: Cli, model: Path) -> None:
    """Spec S7: what is reported is what was applied; a request with these values gives the same reply."""
    flags = ("-t", "0.8", "--repeat-penalty", "1.2", "--dry-multiplier", "0.5", "-l", "50=false", "--stop", "zzz")
    first = reply(cli, model, "-n", 6, *flags)
    sampling = first["sampling"]
    assert set(sampling) == {*RULES, "order", "origin"}
    assert set(sampling["origin"]) == set(RULES)
    asked = {"temperature": 0.8, "repetition_penalty": 1.2, "dry_multiplier": 0.5, "logit_bias": [[50, False]]}
    for field, value in asked.items():
        assert (sampling[field], sampling["origin"][field]) == (value, "flag")
    assert sampling["origin"]["top_p"] == "default"
    assert sampling["order"] == ["penalties", "dry", "temperature"]
    values = {field: sampling[field] for field in RULES}
    assert SamplingParams(**values).seed == sampling["seed"] >= 0
    assert reply(cli, model, "-n", 6, *flags, "-s", sampling["seed"])["token_ids"] == first["token_ids"]


FORMS = {
    (): ("default", 0.0, 0),
    ("--generation-config", "eos"): ("default", 0.0, 0),
    ("--generation-config", "none"): ("default", 0.0, 0),
    ("--generation-config", "auto"): ("generation_config", 0.6, 7),
    ("--generation-config", "FILE"): ("generation_config", 0.25, 3),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_h_c8_the_models_own_values_count_where_they_are_asked_for(
    cli: Cli, model: Path, tmp_path: Path, form: tuple[str, ...]
) -> None:
    """H-C8, docs/spec/clients.md 0.1; a penalty never comes from the file."""
    other = tmp_path / "other.json"
    write_json(other, {**FILE, "temperature": 0.25, "top_k": 3})
    origin, temperature, top_k = FORMS[form]
    sampling = reply(cli, model, "-n", 1, *(other if word == "FILE" else word for word in form))["sampling"]
    assert (sampling["temperature"], sampling["top_k"]) == (temperature, top_k)
    assert sampling["origin"]["temperature"] == sampling["origin"]["top_k"] == sampling["origin"]["top_p"] == origin
    assert sampling["repetition_penalty"] == 1.0


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("override", [(), ("-t", "0.5"), ("--top-p", "1", "-t", "0")], ids=str)
def test_h_c4_overriding_a_field_leaves_the_ends_in_force(
    cli: Cli, model: Path, tmp_path: Path, form: tuple[str, ...], override: tuple[str, ...]
) -> None:
    """H-C1, H-C4: the end that the file names is drawn at once, and ends the reply unless the file was not read."""
    other = tmp_path / "other.json"
    write_json(other, FILE)
    words = [other if word == "FILE" else word for word in form]
    ended = reply(cli, model, "-n", 3, "-l", f"{END}+100", *words, *override)
    if "none" in form:
        assert (ended["finish_cause"], ended["token_ids"]) == ("max_tokens", [END] * 3)
    else:
        assert (ended["finish_cause"], ended["token_ids"], ended["text"]) == ("eos", [], "")
    if override:
        assert ended["sampling"]["origin"]["temperature"] == "flag"


def test_h_c3_ignoring_ends_ignores_those_of_every_file(cli: Cli, model: Path) -> None:
    """H-C3, H-C7, spec F6, F7: none of them is drawn; a stop that the user names still works."""
    ended = reply(cli, model, "-n", 3, "-l", f"{END}+100", "--ignore-eos")
    assert (ended["finish_cause"], len(ended["token_ids"])) == ("max_tokens", 3)
    assert not {1, 3, END} & set(ended["token_ids"])
    stopped = reply(cli, model, "-n", 3, "-l", f"{END}+100", "--ignore-eos", "--stop-token-id", END)
    assert (stopped["finish_cause"], stopped["stop_reason"], stopped["token_ids"]) == ("stop_token", END, [])
    later = reply(cli, model, "-n", 5, "-l", f"{END}+100", "--min-tokens", 2)
    assert (later["finish_cause"], len(later["token_ids"])) == ("eos", 2)


@pytest.mark.parametrize(("asked", "count"), [("0", 0), ("1", 1), ("7", 7)])
def test_h_i5_a_reply_has_as_many_tokens_as_were_asked_for(cli: Cli, model: Path, asked: str, count: int) -> None:
    ended = reply(cli, model, "-n", asked, "--ignore-eos")
    assert (ended["finish_cause"], ended["finish_reason"], len(ended["token_ids"])) == ("max_tokens", "length", count)


def test_h_i5_more_than_fits_ends_with_the_context(cli: Cli, model: Path) -> None:
    for asked in (-1, 2**40, 2**63 - 1):
        ended = reply(cli, model, "-n", asked, "--ignore-eos", "-c", "32")
        assert (ended["finish_cause"], ended["usage"]["total_tokens"]) == ("context", 32)


def test_do_sample_false_is_greedy(cli: Cli, model: Path, tmp_path: Path) -> None:
    """docs/spec/clients.md 0.1."""
    other = tmp_path / "other.json"
    write_json(other, {"do_sample": False, "temperature": 0.9})
    sampling = reply(cli, model, "-n", 1, "--generation-config", other)["sampling"]
    assert (sampling["temperature"], sampling["origin"]["temperature"]) == (0.0, "generation_config")
    sampling = reply(cli, model, "-n", 1, "--generation-config", other, "-t", "0.3")["sampling"]
    assert (sampling["temperature"], sampling["origin"]["temperature"]) == (0.3, "flag")


def test_values_that_cannot_act_are_warned_about(cli: Cli, model: Path) -> None:
    """Spec S9."""
    run = ("generate", model, "--raw", "-p", "hello", "-n", 1, "--top-p", "0.5", "--xtc-threshold", "0.3")
    ran = cli(*run, "--json")
    lines = ["top_p has no effect: the reply is greedy", "xtc_threshold has no effect: xtc_probability is 0"]
    assert json.loads(ran.out)["warnings"] == lines
    assert [line for line in ran.err.splitlines() if line.startswith("warning: ")] == [f"warning: {x}" for x in lines]
    assert reply(cli, model, "-n", 1)["warnings"] == []


def test_strict_refuses_before_a_model_is_loaded(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec S9. Only where the model's own values count has it to be read first."""
    greedy = ("--generation-config", "auto", "-t", "0")
    assert "top_p has no effect" in refused(cli, model, "--top-p", "0.5", "--strict", *greedy)
    assert reply(cli, model, "-n", 1, "--top-p", "0.5", "--strict", "--generation-config", "auto")["warnings"] == []
    monkeypatch.setattr("mlxcel.load.load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    assert "top_p has no effect: the reply is greedy" in refused(cli, model, "--top-p", "0.5", "--strict")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--min-tokens", "5", "-n", "3"), ("min_tokens 5", "max_tokens 3")),
        (("--repeat-penalty", "0"), ("repetition_penalty", "above 0")),
        (("--samplers", "top_p;top_k"), ("samplers", "top_k, typ_p, top_p")),
        (("--stop", ""), ("stop",)),
        (("--loop-detection", "1,65,3"), ("1,65,3",)),
        (("--time-limit", "-1"), ("t_max_predict_ms",)),
        (("--mirostat", "3"), ("mirostat", "from 0 to 2")),
        (("-s", 2**63), ("seed", "from 0 to 2**63 - 1", str(2**63))),
        (("-n", 10**30), ("max_tokens", "0 or more", str(10**30))),
    ],
)
def test_values_are_refused_before_a_model_is_loaded(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], says: tuple[str, ...]
) -> None:
    monkeypatch.setattr("mlxcel.load.load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    message = refused(cli, model, *arguments)
    assert all(word in message for word in says), message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-l", "320+1"), ('logit_bias["320"]', "0 to 319")),
        (("--stop-token-id", "320"), ("stop_token_ids", "320")),
        (("--min-keep", "321"), ("min_keep", "at most 320")),
        (("--min-tokens", "100", "-c", "64"), ("min_tokens", "100")),
    ],
)
def test_what_the_model_cannot_hold_is_refused(
    cli: Cli, model: Path, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    """H-I14, H-M5."""
    message = refused(cli, model, *arguments)
    assert all(word in message for word in says), message


def test_top_k_beyond_the_vocabulary_is_reported_as_it_is_applied(cli: Cli, model: Path) -> None:
    assert reply(cli, model, "-n", 1, "-t", "1", "--top-k", "1000000")["sampling"]["top_k"] == 320


def test_loop_detection_by_flag_variable_and_default(cli: Cli, model: Path) -> None:
    """Spec F19: flag > variable > off. One token again and again is a loop of period 1."""
    run = ("-n", 20, "-l", "50+100")
    assert reply(cli, model, *run)["finish_cause"] == "max_tokens"
    looped = reply(cli, model, *run, "--loop-detection", "1,2,4")
    assert (looped["finish_cause"], looped["stop_reason"]) == ("loop", {"period": 1, "count": 4})
    assert looped["sampling"]["origin"]["loop_detection"] == "flag"
    by_variable = reply(cli, model, *run, MLXCEL_LOOP_DETECTION="on")
    assert (by_variable["finish_cause"], len(by_variable["token_ids"])) == ("loop", 12)
    assert by_variable["sampling"]["loop_detection"] == {"min_pattern": 1, "max_pattern": 20, "min_count": 12}
    assert by_variable["sampling"]["origin"]["loop_detection"] == "environment"
    back = reply(cli, model, *run, "--loop-detection", "off", MLXCEL_LOOP_DETECTION="on")
    assert back["finish_cause"] == "max_tokens"


def test_special_tokens_of_a_raw_prompt_are_reported(cli: Cli, model: Path) -> None:
    assert reply(cli, model, "-n", 0)["sampling"]["add_special_tokens"] is True
    assert reply(cli, model, "-n", 0, "--no-add-special")["sampling"]["add_special_tokens"] is False
    ran = cli("generate", model, "-p", "hello", "-n", 0, "--json", "-q")
    assert json.loads(ran.out)["sampling"]["add_special_tokens"] is False
