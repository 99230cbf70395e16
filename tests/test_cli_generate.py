"""`generate` (docs/spec/clients.md 1.2 to 1.6) on the seeded tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Cli
from tiny_checkpoint import write_tiny_llama

import mlxcel.cli.reply_output

KEYS = (
    *("text", "reasoning_content", "token_ids", "prompt_token_ids", "finish_reason", "finish_cause", "stop_reason"),
    *("usage", "timings", "backend", "model", "sampling", "warnings", "details"),
)
TIMINGS = (
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms"),
    *("predicted_per_token_ms", "predicted_per_second", "queue_ms", "ttft_ms", "load_ms", "download_ms"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    return Cli(monkeypatch, capfdbinary)


def test_json_has_exactly_the_keys_of_the_specification(cli: Cli, model: Path) -> None:
    ran = cli("generate", model, "--raw", "-p", "hello", "-n", 3, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    reply = json.loads(ran.out)
    assert tuple(reply) == KEYS
    assert tuple(reply["timings"]) == TIMINGS
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])
    assert reply["sampling"]["origin"]["max_tokens"] == "flag"
    assert (reply["finish_cause"], reply["finish_reason"], len(reply["token_ids"])) == ("max_tokens", "length", 3)


def test_stdout_is_the_text_and_one_newline(cli: Cli, model: Path) -> None:
    arguments = ("generate", model, "--raw", "-p", "hello", "-n", 8)
    text = json.loads(cli(*arguments, "--json").out)["text"]
    assert text
    assert cli(*arguments).out == f"{text}\n"
    assert cli(*arguments, "--no-stream").out == f"{text}\n"
    assert cli(*arguments, "--no-newline").out == text
    assert "8 tokens" in cli(*arguments).err
    assert cli(*arguments, "-q").err == ""


def test_prompts_from_everywhere_are_the_same_prompt(cli: Cli, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"hello\n")
    base = ("generate", model, "--raw", "-n", 1, "--json", "-q")
    ids = json.loads(cli(*base, "-p", "hello").out)["prompt_token_ids"]
    listed = ",".join(map(str, ids))
    for ran in (
        cli(*base, "-f", file),
        cli(*base, "-f", "-", stdin=b"hello\n"),
        cli(*base, stdin=b"hello"),
        cli("generate", model, "-n", 1, "--json", "-q", "--token-ids", listed),
    ):
        assert json.loads(ran.out)["prompt_token_ids"] == ids
    two = json.loads(cli(*base, stdin=b"hello\n\n").out)["prompt_token_ids"]
    assert two != ids  # one newline is removed, nothing else


def test_messages_and_system_reach_the_template(cli: Cli, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text('[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]')
    base = ("generate", model, "-n", 0, "--json", "-q")
    ids = [
        json.loads(ran.out)["prompt_token_ids"]
        for ran in (cli(*base, "--messages", file), cli(*base, "--system", "Be brief.", "-p", "Hi"))
    ]
    assert ids[0] == ids[1]


def test_zero_tokens_run_no_forward(cli: Cli, model: Path) -> None:
    ran = cli("generate", model, "-p", "hello", "-n", 0)
    assert (ran.code, ran.out) == (0, "\n")
    assert cli("generate", model, "-p", "hello", "-n", 0, "--no-newline").out == ""
    reply = json.loads(cli("generate", model, "-p", "hello", "-n", 0, "--json").out)
    assert (reply["timings"]["prompt_n"], reply["timings"]["ttft_ms"]) == (0, None)


def test_h_s1_no_limit_ends_at_the_end_or_the_context(cli: Cli, model: Path) -> None:
    """H-S1: `-n -1`, the default, goes on until EOS or the context, and says which."""
    for arguments in ((), ("-n", -1)):
        reply = json.loads(cli("generate", model, "--raw", "-p", "hi", "-c", 40, "--json", *arguments).out)
        total = reply["usage"]["total_tokens"]
        assert (reply["finish_cause"] == "context" and total == 40) or reply["finish_cause"] == "eos"


def test_an_interrupt_keeps_what_was_said(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    write = mlxcel.cli.reply_output.write

    def interrupted(text: str) -> None:
        write(text)
        said.append(text)
        if len(said) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(mlxcel.cli.reply_output, "write", interrupted)
    ran = cli("generate", model, "--raw", "-p", "hello", "-n", 20)
    assert ran.code == 130
    assert ran.out == "".join(said[:2]) + "\n"
    assert "cancelled" in ran.err


@pytest.mark.parametrize("phase", ["resolve_model", "open_checkpoint"])
def test_an_interrupt_while_loading_ends_with_130(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mlxcel.load.{phase}", interrupted)
    ran = cli("generate", model, "-p", "hello")
    assert (ran.code, ran.out) == (130, "")
    assert "Traceback" not in ran.err


def test_an_interrupt_in_the_prefill_cancels_the_row(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxcel_reference_numpy.backend.NumpyBackend.submit", interrupted)
    ran = cli("generate", model, "--raw", "-p", "hello")
    assert (ran.code, ran.out) == (130, "\n")
    assert "0 tokens · cancelled" in ran.err
    reply = json.loads(cli("generate", model, "--raw", "-p", "hello", "--json").out)
    assert (reply["finish_cause"], reply["finish_reason"], reply["token_ids"]) == ("cancelled", None, [])


def test_a_seeded_sample_repeats_and_reports_its_seed(cli: Cli, model: Path) -> None:
    base = ("generate", model, "--raw", "-p", "hello", "-n", 6, "--json", "-t", "0.9")
    fresh = json.loads(cli(*base).out)
    again = json.loads(cli(*base, "-s", fresh["sampling"]["seed"]).out)
    assert again["token_ids"] == fresh["token_ids"]


def test_the_chosen_backend_is_said(cli: Cli, model: Path) -> None:
    assert cli("generate", model, "-p", "x", "-n", 0).err.startswith("backend: reference-numpy (the best one available")
    named = cli("--backend", "reference-numpy", "generate", model, "-p", "x", "-n", 0)
    assert named.err.startswith("backend: reference-numpy (asked for by --backend")


def test_token_ids_go_to_stderr(cli: Cli, model: Path) -> None:
    base = ("generate", model, "--raw", "-p", "hello", "-n", 3)
    ids = json.loads(cli(*base, "--json").out)["token_ids"]
    line = f"token ids: {' '.join(map(str, ids))}\n"
    assert line in cli(*base, "--print-token-ids").err
    assert line in cli(*base, MLXCEL_PRINT_TOKEN_IDS="1").err


def test_the_default_model_says_what_the_reference_says(cli: Cli, smollm2_path: Path) -> None:
    """docs/spec/clients.md 1.10, test 5: an independent implementation's greedy ids while its best two are apart."""
    file = Path(__file__).parent / "data/golden/smollm2-135m.json"
    case = next(case for case in json.loads(file.read_text())["cases"] if case["id"] == "raw-capital")
    reply = json.loads(cli("generate", smollm2_path, "--raw", "-p", case["prompt"], "-n", 6, "--json", "-q").out)
    certain = next((place for place, gap in enumerate(case["top2_gap"]) if gap < 5e-4), len(case["top2_gap"]))
    length = min(certain, 6)
    assert length > 4
    assert reply["prompt_token_ids"] == case["prompt_ids"]
    assert reply["token_ids"][:length] == case["greedy_ids"][:length]
