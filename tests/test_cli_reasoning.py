"""Reasoning of a reply on the command line: hidden, shown, and in --json (spec T9 to T11, docs/spec/clients.md 1.5)."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from cli_runs import Cli
from plugin_doubles import Installer
from tiny_checkpoint import CHATML, write_tiny_llama

SAMPLER = """
    import numpy as np

    from mlxcel.core.named import Named
    from mlxcel.plugins.hookspecs import hookimpl
    from mlxcel.plugins.sampling.chain import ChainSampler


    @hookimpl
    def mlxcel_samplers():
        return [Named("recital", "says one text", f"{__name__}:Recital")]


    class Recital(ChainSampler):
        name = "recital"

        def __init__(self, *, vocab, tokenizer, processors):
            super().__init__(vocab=vocab, tokenizer=tokenizer, processors=processors)
            self.ids = np.array([*tokenizer.encode(SAYS, add_special=False), 1], np.int32)

        def open(self, spec):
            self.start = len(spec.prompt_ids)
            return super().open(spec)

        def draw(self, xp, logits, sampling, carry):
            return super().draw(xp, logits, sampling, carry)._replace(
                tokens=self.ids[sampling.params["position"].astype(np.int64) - self.start]
            )
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    return Cli(monkeypatch, capfdbinary)


def arguments(third_party: Installer, model: Path, says: str) -> tuple[Any, ...]:
    third_party.install("recital", f"SAYS = {says!r}\n{dedent(SAMPLER)}")
    template = CHATML + "{# the model writes <think> and </think> #}"
    return ("generate", model, "-p", "hello", "--sampler", "recital", "--chat-template", template)


SAYS = "<think>because\nit is so</think>\n\nyes"
ANSWER, WHY = "\n\nyes", "because\nit is so"


def test_reasoning_is_hidden_unless_it_is_asked_for(cli: Cli, model: Path, third_party: Installer) -> None:
    run = arguments(third_party, model, SAYS)
    for words in ((), ("--no-stream",)):
        assert cli(*run, *words).out == f"{ANSWER}\n"
        assert cli(*run, *words, "--show-reasoning").out == f"{WHY}\n{ANSWER}\n"
    assert cli(*run, "--show-reasoning", "--no-newline").out == f"{WHY}\n{ANSWER}"


def test_json_has_both(cli: Cli, model: Path, third_party: Installer) -> None:
    reply = json.loads(cli(*arguments(third_party, model, SAYS), "--json").out)
    assert (reply["reasoning_content"], reply["text"]) == (WHY, ANSWER)
    assert reply["usage"]["completion_tokens"] == len(reply["token_ids"]) > 20


@pytest.mark.parametrize("shown", [False, True])
def test_formats_that_keep_it_in_the_text(cli: Cli, model: Path, third_party: Installer, shown: bool) -> None:
    """`none` does not split; `deepseek-legacy` splits and keeps the whole text, which is not printed twice."""
    run = (*arguments(third_party, model, SAYS), *(["--show-reasoning"] if shown else []))
    assert cli(*run, "--reasoning-format", "none").out == f"{SAYS}\n"
    assert cli(*run, "--reasoning-format", "deepseek-legacy").out == f"{SAYS}\n"
    reply = json.loads(cli(*run, "--reasoning-format", "deepseek-legacy", "--json").out)
    assert (reply["reasoning_content"], reply["text"]) == (WHY, SAYS)
    assert json.loads(cli(*run, "--reasoning-format", "none", "--json").out)["reasoning_content"] is None


def test_a_reply_of_reasoning_alone_says_so(cli: Cli, model: Path, third_party: Installer) -> None:
    """Spec T11."""
    run = arguments(third_party, model, "<think>because\n")
    ran = cli(*run)
    assert ran.out == "\n"
    assert "the reply is reasoning alone: --show-reasoning prints it" in ran.err
    ran = cli(*run, "--show-reasoning")
    assert ran.out == "because\n\n"
    assert "reasoning alone" not in ran.err


def test_a_raw_reply_is_not_split_unless_asked(cli: Cli, model: Path, third_party: Installer) -> None:
    """Spec T10."""
    third_party.install("recital", f"SAYS = {SAYS!r}\n{dedent(SAMPLER)}")
    run = ("generate", model, "-p", "hello", "--sampler", "recital", "--raw")
    assert cli(*run).out == f"{SAYS}\n"
    assert cli(*run, "--reasoning-format", "deepseek").out == f"{ANSWER}\n"
