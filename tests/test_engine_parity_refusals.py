"""What `engine-parity` refuses (docs/spec/clients.md 5.5, 5.7: 3): exit code 2, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Cli, Ran
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_llama

from mlxcel.testing.random_checkpoint import SHAPES

Refused = Callable[..., Ran]
ON = {"MLXCEL_SDPA_DETERMINISTIC": "1"}


@pytest.fixture(scope="module")
def unloadable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer and config are sound, and which lacks a weight."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    weights = tiny_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", weights)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    monkeypatch.delenv("MLXCEL_SDPA_DETERMINISTIC", raising=False)
    return Cli(monkeypatch, capfdbinary)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pairs", "client,nobody"), "'client,nobody' is not a list of client, storage"),
        (("--pairs", "client,client"), "is not a list of client, storage"),
        (("--pairs", ""), "is not a list of client, storage"),
        (("--cases", "warm"), "'warm' is not a list of greedy, seeded"),
        (("--require", "nobody"), "'nobody' is not a list of client"),
        (("--other-backend", "jax-cuda", "--pairs", "client"), "--other-backend jax-cuda: --pairs leaves backend out"),
        (("--require", "chunk", "--pairs", "client"), "--require chunk: --pairs leaves it out"),
        (("--chunks", "128"), "'128' is not two numbers of tokens"),
        (("--chunks", "0,128"), "'0,128' is not two numbers of tokens"),
        (("--chunks", "64,64"), "--chunks 64,64: both are the same"),
        (("--batch", "1"), "'1' is not an integer from 2"),
        (("-n", "0"), "'0' is not an integer from 1"),
        (("--gap-bound", "nan"), "'nan' is not a number"),
        (("--seed", "-1"), "'-1' is not an integer from 0"),
        (("--other-backend", "abacus"), "abacus"),
        (("--other-backend", "reference-numpy"), "--other-backend reference-numpy is the backend itself"),
        (("--random-weights", "gpt-9"), "--random-weights gpt-9: there is no such shape"),
        (("--random-weights", "qwen3-0.6b"), "--random-weights qwen3-0.6b and the model"),
        (("-p", "a", "--token-ids", "1"), "exclude each other"),
        (("-p", "a", "--prompt-tokens", "10"), "-p and --prompt-tokens exclude each other"),
        (("--chat",), "--chat needs a text"),
        (("--chat", "--token-ids", "1,2"), "--chat needs a text"),
        (("-p", ""), "the prompt is empty"),
        (("--token-ids", "1,999"), "999"),
        (("--prompt-tokens", "0"), "the prompt is empty"),
        (("--prompt-tokens", "2000", "-n", "49"), "2000 tokens and 49 behind it come to 2049, the context holds 2048"),
        (("--prompt-tokens", "2147483647"), "2147483647 tokens and 64 behind it"),  # before such a prompt is made
        (("--token-ids", "7,8", "-n", "2047", "--pairs", "client"), "2 tokens and 2047 behind it come to 2049"),
        (("-c", "600"), "600"),
        (("--loop-detection", "on"), "no such option"),
        (("--json", "/nowhere/at/all.json"), "--json /nowhere/at/all.json cannot be written"),
    ],
)
def test_an_option_that_cannot_be_obeyed(run: Cli, unloadable: Path, arguments: tuple[str, ...], words: str) -> None:
    ran = run("engine-parity", unloadable, "--backend", "reference-numpy", *arguments, **ON)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert "hint: " in ran.err


def test_what_is_allowed_does_try_to_load(run: Cli, unloadable: Path) -> None:
    """The control of the cases above and below: this model cannot be loaded."""
    ran = run("engine-parity", unloadable, "--backend", "reference-numpy", **ON)
    assert ran.code == 3
    assert "model.layers.1.mlp.up_proj.weight" in ran.err


@pytest.mark.parametrize("backend", ["reference-numpy", "jax-cuda"])
@pytest.mark.parametrize("more", [(), ("--expect-identical",), ("--pairs", "client", "--cases", "greedy")])
def test_without_the_switch_nothing_runs(run: Cli, unloadable: Path, backend: str, more: tuple[str, ...]) -> None:
    """5.5: in any mode and on any backend, and both ways to say it are named."""
    for environ in ({}, {"MLXCEL_SDPA_DETERMINISTIC": "0"}):
        ran = run("engine-parity", unloadable, "--backend", backend, "--device", "cpu", *more, **environ)
        assert ran.code == 2
        assert "MLXCEL_SDPA_DETERMINISTIC=1" in ran.err
        assert "--deterministic" in ran.err


def test_the_variable_and_the_flag_are_equal(run: Cli, unloadable: Path) -> None:
    flag = run("engine-parity", unloadable, "--backend", "reference-numpy", "--deterministic")
    variable = run("engine-parity", unloadable, "--backend", "reference-numpy", **ON)
    assert flag == variable


@pytest.mark.parametrize(
    ("arguments", "words", "allowed"),
    [
        (("--prompt-tokens", "128"), "pairs of chunk: 128 tokens, the smaller chunk", "client,storage,cache,batch"),
        (("--prompt-tokens", "20"), "pairs of chunk and cache", "client,storage,batch"),
        (("--token-ids", "7", "--pairs", "cache"), "pairs of cache", None),
        (("--token-ids", "7", "--pairs", "cache,client"), "pairs of cache", "client"),
        (("--prompt-tokens", "100", "--prompt-cache-min-prefix", "76", "--pairs", "client,cache"), "75", "client"),
    ],
)
def test_a_prompt_too_short_names_the_groups_it_allows(
    run: Cli, unloadable: Path, arguments: tuple[str, ...], words: str, allowed: str | None
) -> None:
    ran = run("engine-parity", unloadable, "--backend", "reference-numpy", *arguments, **ON)
    assert ran.code == 2
    assert "too short" in ran.err
    assert words in ran.err
    assert (f"--pairs {allowed}" if allowed else "hint: take a longer one\n") in ran.err


def test_at_r1_a_hit_is_a_multiple_of_the_chunk() -> None:
    """X6: three quarters of 170 tokens hold no chunk of 128, those of 171 do."""
    from mlxcel.errors import UsageError
    from mlxcel.tools.parity.early import check_length
    from mlxcel.tools.parity.options import ParityOptions

    options = ParityOptions()
    with pytest.raises(UsageError, match="multiples of 128"):
        check_length(170, options, ["cache"], "R1", 16, 8192)
    check_length(171, options, ["cache"], "R1", 16, 8192)
    check_length(170, options, ["cache"], "R2", 16, 8192)
    with pytest.raises(UsageError):
        check_length(21, options, ["cache"], "R2", 16, 8192)  # 15 tokens are shared
    check_length(22, options, ["cache"], "R2", 16, 8192)


def test_the_help_names_every_shape_of_random_weights(run: Cli) -> None:
    text = " ".join(run("engine-parity", "--help").out.split())
    assert all(name in text for name in SHAPES)
