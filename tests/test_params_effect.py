"""Every parameter acts: two extreme values of each give two different outcomes, through the whole engine (H-E3, H-E5).

Fields of the distribution run on a real model, fields of the text and its end on a script of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from engine_rows import CAPS
from plugin_doubles import Installer
from tiny_checkpoint import write_tiny_llama

from mlxcel import direct
from mlxcel.config import EngineConfig
from mlxcel.core.bind_params import Caps
from mlxcel.core.param_table import RULES
from mlxcel.core.params import STAGE_NAMES, SamplingParams
from mlxcel.core.source import NoProgress
from mlxcel.errors import RequestError
from mlxcel.load import LoadedModel, load_model
from mlxcel.plugins.manager import PluginManager
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.prepare import raw_prompt, sequence_spec
from mlxcel.testing.byte_tokenizer import BOS, EOS, TURN_END, ByteTokenizer
from mlxcel.testing.scripted import scripted_engine

TEXT = "one and one and one and"
"""Repeats itself, so that windows and DRY have something to look at."""

ALL = Caps(max_n=1, max_logprobs=-1)


@attrs.frozen
class Outcome:
    """What a client can see of a reply."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    reasoning: str | None
    ending: tuple[str, Any]
    logprobs: str  # of each token, lists included, as text: it compares -inf and nan too
    prompt_logprobs: str


def outcome(result: Any) -> Outcome:
    if result.error is not None:
        raise result.error
    return Outcome(
        result.prompt_ids,
        result.token_ids,
        result.text,
        result.reasoning,
        (result.cause, result.stop_reason),
        repr(result.logprobs),
        repr(result.prompt_logprobs),
    )


def loaded(folder: Path, only: tuple[str, ...] | None = ()) -> LoadedModel:
    config = EngineConfig.resolve({"model": str(folder), "max_model_len": 128}, environ={})
    return load_model(config, PluginManager.load(only=only, trace=None), NoProgress())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded model of 320 ids with a tokenizer that adds a BOS."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedModel]:
    with loaded(folder) as made:
        yield made


def real(model: LoadedModel, **given: Any) -> Outcome:
    params = SamplingParams(**{"seed": 1, "max_tokens": 6, "logprobs": -1, "logprobs_mode": "processed", **given})
    spec = sequence_spec(model, raw_prompt(model, TEXT, params), params, request_id="real", caps=ALL)
    return outcome(direct.generate(model.engine, spec, planner=model.planner))


REAL: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "max_tokens": ({}, 1, 5),
    "temperature": ({}, 0.01, 100),
    "top_k": ({}, 2, 0),
    "top_p": ({}, 0.05, 1),
    "min_p": ({}, 0.9, 0),
    "typical_p": ({}, 0.05, 1),
    "top_n_sigma": ({}, 0.5, -1),
    "min_keep": ({"top_p": 0.01}, 0, 300),
    "xtc_probability": ({"xtc_threshold": 0.001}, 0, 1),
    "xtc_threshold": ({"xtc_probability": 1}, 0.001, 0.5),
    "dynatemp_range": ({}, 0, 0.99),
    "dynatemp_exponent": ({"dynatemp_range": 0.99}, 0.01, 100),
    "mirostat": ({"mirostat_tau": 0.5}, 0, 2),
    "mirostat_tau": ({"mirostat": 2}, 0.1, 20),
    "mirostat_eta": ({"mirostat": 2, "mirostat_tau": 2}, 0.001, 1),
    "adaptive_target": ({}, -1, 0.9),
    "adaptive_decay": ({"adaptive_target": 0.4}, 0, 0.99),
    "repetition_penalty": ({}, 0.5, 10),
    "repeat_last_n": ({"repetition_penalty": 10}, 0, -1),
    "presence_penalty": ({}, -2, 2),
    "frequency_penalty": ({}, -2, 2),
    "window_presence_penalty": ({}, -2, 2),
    "window_frequency_penalty": ({}, -2, 2),
    "dry_multiplier": ({}, 0, 5),
    "dry_base": ({"dry_multiplier": 1}, 1, 4),
    "dry_allowed_length": ({"dry_multiplier": 1}, 1, 100),
    "dry_penalty_last_n": ({"dry_multiplier": 1}, 0, -1),
    "dry_sequence_breakers": ({"dry_multiplier": 1}, (), ("d",)),
    "logit_bias": ({}, [["e", -100]], [["e", 100]]),
    "bad_words": ({"logit_bias": [[100, 100]]}, (), ("`",)),
    "allowed_token_ids": ({}, None, (10, 11)),
    "seed": ({"temperature": 2}, 0, 2**63 - 1),
    "logprobs": ({}, 0, -1),
    "prompt_logprobs": ({}, None, 20),
    "logprobs_mode": ({"temperature": 0.5}, "raw", "processed"),
    "post_sampling_probs": ({}, False, True),
    "add_special_tokens": ({}, False, True),
    "truncate_prompt_tokens": ({}, None, 2),
    "samplers": ({"top_k": 2}, (), ("top_k",)),
}


@pytest.mark.parametrize("field", REAL)
def test_h_e3_two_values_of_a_field_give_two_outcomes_on_a_model(model: LoadedModel, field: str) -> None:
    base, first, second = REAL[field]
    one, other = real(model, **base, **{field: first}), real(model, **base, **{field: second})
    assert one != other
    assert real(model, **base, **{field: first}) == one  # it was the field, not the run


SAME: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("top_k", {}, 0, -1),
    ("top_k", {}, 0, 10**6),
    ("top_k", {}, 0, 320),
    ("top_n_sigma", {}, 0, -1),
    ("min_keep", {"top_p": 0.01}, 0, 1),
    ("xtc_probability", {"xtc_threshold": 0.51}, 0, 1),
    ("repeat_last_n", {"repetition_penalty": 10}, -1, 1000),
    ("repetition_penalty", {"repeat_last_n": 0}, 1, 10),
    ("dry_penalty_last_n", {"dry_multiplier": 1}, -1, 1000),
    ("dry_multiplier", {"dry_penalty_last_n": 0}, 0, 5),
    ("logprobs", {}, -1, 320),
    ("truncate_prompt_tokens", {}, None, -1),
    ("add_special_tokens", {}, None, True),
    ("max_tokens", {}, -1, 2**40),
    ("samplers", {"top_k": 2, "min_p": 0.01}, None, STAGE_NAMES),
    ("top_k", {"mirostat": 2}, 0, 3),
    ("top_p", {"temperature": 0}, 1, 0.1),
    ("seed", {"temperature": 0}, 0, 7),
]


@pytest.mark.parametrize(("field", "base", "first", "second"), SAME, ids=str)
def test_h_e5_sentinels_mean_what_the_table_says(
    model: LoadedModel, field: str, base: dict[str, Any], first: Any, second: Any
) -> None:
    """Spec 4.2: several ways to say "off" or "all" are one; what `warnings` calls inert does nothing."""
    assert real(model, **base, **{field: first}) == real(model, **base, **{field: second})


SAID = b"<think>why</think>a\n  b\nxyzxyzxyzxyz"
SCRIPT = (*SAID, BOS, TURN_END, *b"more", EOS)


def scripted(**given: Any) -> Outcome:
    tokenizer = ByteTokenizer()
    made = scripted_engine({"row": SCRIPT}, tokenizer=tokenizer, context=128, delay=1.0)
    params = SamplingParams(**{"temperature": 0, "seed": 1, "reasoning_format": "none", **given})
    model: Any = SimpleNamespace(
        template=None,
        tokenizer=tokenizer,
        ends=SimpleNamespace(ids=frozenset({TURN_END, EOS})),
        facts=SimpleNamespace(vocab=tokenizer.size, context=128),
    )
    spec = sequence_spec(model, raw_prompt(model, "?", params), params, request_id="row", caps=ALL)
    planner = ChunkedPlanner(chunk=2048, level="R2", caps=CAPS)
    return outcome(direct.generate(made.engine, spec, planner=planner, clock=made.clock))


SCRIPTED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "min_tokens": ({}, 0, len(SCRIPT) - 1),
    "stop": ({}, (), ("xyz",)),
    "stop_token_ids": ({}, (), (ord("x"),)),
    "include_stop_str_in_output": ({"stop": ("xyz",)}, False, True),
    "ignore_eos": ({"max_tokens": len(SCRIPT)}, False, True),
    "skip_special_tokens": ({}, False, True),
    "reasoning_format": ({}, "none", "deepseek"),
    "t_max_predict_ms": ({}, 0, 3000),
    "n_indent": ({}, 0, 2),
    "loop_detection": ({}, None, {"max_pattern": 3, "min_count": 3}),
}


@pytest.mark.parametrize("field", SCRIPTED)
def test_h_e3_two_values_of_a_field_give_two_outcomes_on_a_script(field: str) -> None:
    base, first, second = SCRIPTED[field]
    one, other = scripted(**base, **{field: first}), scripted(**base, **{field: second})
    assert one != other
    assert scripted(**base, **{field: first}) == one


def test_a_count_of_replies_is_refused_where_there_is_one_row(model: LoadedModel) -> None:
    """docs/spec/clients.md 0, rule 2: honoured, or refused by name."""
    with pytest.raises(RequestError, match="n is 2, it must be at most 1 here"):
        real(model, n=2)


ONLY = """
    import numpy as np

    from mlxcel.core.named import Named
    from mlxcel.plugins.hookspecs import hookimpl


    @hookimpl
    def mlxcel_logits_processors():
        return [Named("only", "one id is left", f"{__name__}:Only")]


    class Only:
        stage = "masks"
        history = 0

        def __init__(self, *, vocab, tokenizer):
            self.ids = np.arange(vocab)

        def prepare(self, args, spec):
            return {"id": np.array([args["id"]], np.int32)}

        def apply(self, xp, logits, params, history):
            return xp.where(self.ids[None, :] == params["id"][:, :1], logits, xp.float32(-xp.inf))
"""


def test_a_processor_of_a_third_party_acts_where_it_is_asked_for(folder: Path, third_party: Installer) -> None:
    """Field `logits_processors`, spec S48."""
    third_party.install("only", dedent(ONLY))
    with loaded(folder, only=None) as made:
        one, other = real(made), real(made, logits_processors=[{"name": "only", "args": {"id": 99}}])
        assert one != other
        assert other.token_ids == (99,) * 6
        with pytest.raises(RequestError, match="unknown"):
            real(made, logits_processors=[{"name": "unknown"}])


def test_no_field_is_left_out() -> None:
    assert {*REAL, *SCRIPTED, "n", "logits_processors"} == set(RULES)
    assert not set(REAL) & set(SCRIPTED)


@pytest.mark.parametrize("reasoning_format", ["deepseek", "deepseek-legacy"])
def test_reasoning_is_split_off(reasoning_format: str) -> None:
    """Spec T9."""
    said = scripted(reasoning_format=reasoning_format)
    assert said.reasoning == "why"
    assert said.text.startswith("a\n" if reasoning_format == "deepseek" else "<think>why</think>a\n")


LEAST, MOST = 1.2e-38, 1e9
EDGES: list[dict[str, Any]] = [
    {"temperature": 1e-5},
    {"temperature": 100},
    {"typical_p": LEAST},
    {"top_p": 5e-324},
    {"min_p": 5e-324},
    {"top_n_sigma": LEAST},
    {"top_n_sigma": MOST},
    {"min_keep": 320, "top_p": 0},
    {"xtc_probability": 1, "xtc_threshold": 0},
    {"dynatemp_range": MOST},
    {"dynatemp_range": 1, "dynatemp_exponent": LEAST},
    {"dynatemp_range": 1, "dynatemp_exponent": MOST},
    {"temperature": 0, "dynatemp_range": LEAST},
    *({"mirostat": version, "mirostat_tau": tau} for version in (1, 2) for tau in (LEAST, MOST)),
    *({"mirostat": version, "mirostat_eta": eta} for version in (1, 2) for eta in (LEAST, MOST)),
    *({"adaptive_target": target, "adaptive_decay": decay} for target in (LEAST, 1) for decay in (0, 0.99)),
    {"repetition_penalty": LEAST, "repeat_last_n": -1},
    {"repetition_penalty": 10, "repeat_last_n": 2**63 - 1},
    {"dry_multiplier": MOST, "dry_base": MOST, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    {"dry_multiplier": LEAST, "dry_base": 1, "dry_allowed_length": 2**31 - 1},
    {"dry_multiplier": 1, "dry_penalty_last_n": 2**63 - 1},
    {"logit_bias": [[token, 100] for token in range(300)]},
    {"logit_bias": [[token, -100] for token in range(300)]},
    {"logit_bias": [[token, False] for token in range(299)]},
    {"presence_penalty": -2, "frequency_penalty": -2, "window_presence_penalty": -2, "window_frequency_penalty": -2},
    {"top_k": 2**63 - 1},
    {"t_max_predict_ms": 1e15},
    {"max_tokens": 2**63 - 1, "stop_token_ids": list(range(64))},
]


@pytest.mark.parametrize("given", EDGES, ids=str)
def test_values_at_the_edge_of_their_range_run(model: LoadedModel, given: dict[str, Any]) -> None:
    """H-M1: every number that is accepted gives tokens of the vocabulary, and no NaN among their chances."""
    said = real(model, **given)
    assert all(0 <= token < 300 for token in said.token_ids)
    assert "nan" not in said.logprobs
    assert said.ending[0] in ("max_tokens", "context", "eos", "stop_token")
