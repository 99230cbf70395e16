"""Bad input: one `error:` line, a hint, the right exit code, no trace (docs/spec/clients.md 1.3)."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import traceback
from pathlib import Path

import pytest
from cli_runs import Cli
from tiny_checkpoint import write_tiny_gguf, write_tiny_llama

from mlxcel.errors import UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf").read_bytes()


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    return Cli(monkeypatch, capfdbinary)


def refused(cli: Cli, code: int, *arguments: object, says: tuple[str, ...] = (), **options: str) -> None:
    ran = cli(*arguments, **options)
    assert ran.code == code, ran.err
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ran.err
    assert "Traceback" not in ran.err
    assert "error: unexpected" not in ran.err
    assert ran.out.strip() == ""
    for words in says:
        assert words in ran.err, ran.err


PAIRS = (
    (("-p", "x", "-f", "y"), ("-p", "-f")),
    (("-q", "-v", "-p", "x"), ("-q", "-v")),
    (
        ("-p", "x", "--chat-template", "{{ a }}", "--chat-template-file", "f"),
        ("--chat-template", "--chat-template-file"),
    ),
    (("--raw", "--system", "s", "-p", "x"), ("--raw", "--system")),
    (("--raw", "--messages", "m"), ("--raw", "--messages")),
    (("--messages", "m", "-p", "x"), ("-p", "--messages")),
    (("--messages", "m", "--system", "x"), ("--messages", "--system")),
    (("--token-ids", "1", "-p", "x"), ("-p", "--token-ids")),
    (("--raw", "-p", "x", "--chat-template", "{{ a }}"), ("--chat-template", "--raw")),
    (("-p", "x", "-t", "0", "--temp", "1"), ("--temperature", "0", "1")),
    (("-p", "x", "--ctx-size", "9", "-c", "10"), ("9", "10")),
)


@pytest.mark.parametrize(("arguments", "says"), PAIRS)
def test_h_s4_conflicts_name_both_before_a_model_is_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    """H-S4."""
    monkeypatch.setattr("mlxcel.load.load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    refused(cli, 2, "generate", *arguments, says=says)


VALUES = (
    (("-n", "-2"), "max_tokens"),
    (("-t", "-1"), "temperature"),
    (("-t", "nan"), "nan"),
    (("-t", "inf"), "inf"),
    (("-t", "1e999"), "1e999"),
    (("-n", "1_0"), "1_0"),
    (("-n", "1.5"), "1.5"),
    (("--top-p", "1.1"), "top_p"),
    (("-s", "-2"), "seed"),
    (("-c", "-1"), "'-1'"),
    (("--kv-cache-budget", "0"), "'0'"),
    (("--device", "gpu"), "cuda"),
    (("--token-ids", "1,x"), "token ids"),
    (("--bakend", "x"), "--backend"),
)


@pytest.mark.parametrize(("arguments", "says"), VALUES)
def test_values_are_refused_before_a_model_is_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("mlxcel.load.load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    prompt = () if "--token-ids" in arguments else ("-p", "x")
    refused(cli, 2, "generate", *prompt, *arguments, says=(says,))


def test_globals_on_both_sides_must_agree(cli: Cli) -> None:
    refused(cli, 2, "--backend", "a", "generate", "-p", "x", "--backend", "b", says=("--backend", "'a'", "'b'"))
    refused(cli, 2, "genrate", says=("did you mean `mlxcel generate`",))


def test_names_that_are_not_there(cli: Cli, model: Path) -> None:
    run = ("generate", model, "-p", "x")
    refused(cli, 2, "generate", "smollm2-135m", "-p", "x", says=("smollm2-135m-instruct",))
    refused(cli, 2, *run, "--backend", "numpy", says=("numpy", "reference-numpy"))
    refused(cli, 2, *run, "--kv-storage", "pages", says=("pages", "dense", "paged"))
    refused(cli, 2, *run, "--sampler", "chan", says=("chain",))
    refused(cli, 3, *run, "--device", "cuda", says=("cuda", "mlxcel[cuda13]"))
    refused(cli, 3, *run, "--device", "cuda", "--backend", "reference-numpy", says=("cuda",))
    refused(cli, 3, *run, "--backend", "jax-cuda", says=("jax-cuda",))
    refused(cli, 2, *run, "-m", "other", says=("MODEL", "--model"))


def test_damaged_gguf_files(cli: Cli, gguf: bytes, tmp_path: Path) -> None:
    """Truncated, another magic, offsets past the end, 2^60 tensors: refused by the header."""
    file = tmp_path / "bad.gguf"
    huge = gguf[:8] + struct.pack("<Q", 2**60) + gguf[16:]
    for data in (gguf[: len(gguf) // 2], gguf[:20], b"NOPE" + gguf[4:], gguf[:-4096], huge):
        file.write_bytes(data)
        refused(cli, 3, "generate", file, "-p", "x", says=("bad.gguf",))


def test_folders_that_hold_no_model(cli: Cli, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    refused(cli, 3, "generate", other, "-p", "x", says=("'lama'", "llama", "mlxcel_families"))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(cli, 3, "generate", pickled, "-p", "x", says=("bin", "hint:"))
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(cli, 3, "generate", empty, "-p", "x")


def test_prompts_that_cannot_be_run(cli: Cli, model: Path, tmp_path: Path) -> None:
    run = ("generate", model)
    refused(cli, 2, *run, "--raw", "-p", "a long prompt", "-c", 4, says=("--ctx-size", "4"))
    refused(cli, 2, *run, "--raw", "-p", "", says=("empty",))
    refused(cli, 2, *run, says=("nothing came on stdin", 'hint: mlxcel generate -p "'))  # that of a job without one
    refused(cli, 2, *run, "-f", tmp_path / "absent", says=("absent",))
    refused(cli, 2, *run, "--token-ids", "5,320", says=("320",))
    refused(cli, 2, *run, "-p", "x", "--stop-token-id", "320", says=("320",))
    file = tmp_path / "latin"
    file.write_bytes(b"caf\xe9")
    refused(cli, 2, *run, "-f", file, says=("UTF-8", "byte 3"))
    refused(cli, 2, *run, "--messages", file, says=("UTF-8",))
    refused(cli, 2, *run, "-p", "x", "-c", "100000", says=("100000", "2048"))
    refused(cli, 2, *run, "-p", "x", "--kv-cache-budget", "1K", says=("--kv-cache-budget",))


def test_the_default_model_offline(cli: Cli, tmp_path: Path) -> None:
    refused(cli, 3, "--offline", "generate", "-p", "x", says=("smollm2-135m-instruct", "MLXCEL_MODELS_DIR"))
    (tmp_path / "file").write_text("")
    refused(cli, 3, "generate", "-p", "x", MLXCEL_MODELS_DIR=str(tmp_path / "file" / "store"))


@pytest.mark.parametrize("name", ["MLXCEL_CTX_SIZE", "MLXCEL_DEVICE", "MLXCEL_KV_CACHE_BUDGET", "MLXCEL_OFFLINE"])
def test_a_malformed_variable_is_named(cli: Cli, model: Path, name: str) -> None:
    refused(cli, 2, "generate", model, "-p", "x", says=(name, "'nonsense'"), **{name: "nonsense"})


def test_a_trace_only_with_vv(cli: Cli, model: Path) -> None:
    ran = cli("generate", model, "--raw", "-p", "", "-vv")
    assert ran.code == 2
    assert "Traceback" in ran.err


@pytest.mark.parametrize("hint", ["take another one", None])
def test_a_traceback_ends_with_the_hint(hint: str | None) -> None:
    """For programs, which print no hints of their own."""
    *_, last = traceback.format_exception(UsageError("it is wrong", hint=hint))
    assert last == ("mlxcel.errors.UsageError: it is wrong\n" if hint is None else "hint: take another one\n")


def test_a_hint_that_is_changed_is_the_one_that_a_traceback_ends_with() -> None:
    """Whoever lets an error through may know the next step better; notes of others stay, and so does a copy's."""
    error = UsageError("it is wrong", hint="take another one")
    error.add_note("behind prompt 3")
    error.hint = "/undo drops the last exchange"
    kept = pickle.loads(pickle.dumps(error))
    for each in (error, kept):
        assert traceback.format_exception_only(each)[1:] == [
            "behind prompt 3\n",
            "hint: /undo drops the last exchange\n",
        ]
    error.hint = None
    assert traceback.format_exception_only(error)[1:] == ["behind prompt 3\n"]
