"""The program where its streams are closed, full, or not UTF-8 (docs/spec/clients.md 1.2 and 1.3)."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_llama

from mlxcel.cli.main import main
from mlxcel.config import EngineConfig
from mlxcel.errors import CheckpointError, UsageError
from mlxcel.load import open_checkpoint
from mlxcel.plugins.manager import PluginManager


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def program(tmp_path):
    """Runs `mlxcel ARGS` under a shell that redirects; `variables` are put over the environment."""

    def run(redirections, *arguments, **variables):
        command = [sys.executable, "-m", "mlxcel", *arguments]
        script = ["sh", "-c", f'exec "$@" {redirections}', "sh", *command]
        environment = {**os.environ, "MLXCEL_CACHE_DIR": str(tmp_path), **variables}
        return subprocess.run(script, capture_output=True, env=environment, timeout=60)

    return run


REPLY = ("--raw", "-p", "hi", "-n", "3")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_where_stderr_cannot_be_written_the_reply_still_comes(program, folder, redirection):
    """Streams: stdout is the reply and one newline, whatever becomes of stderr."""
    plain = program("", "-q", "generate", folder, *REPLY)
    done = program(redirection, "-vv", "generate", folder, *REPLY)
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert plain.stdout.endswith(b"\n")
    assert len(plain.stdout) > 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("loud", [[], ["-vv"]])
def test_an_error_that_cannot_be_told_is_never_told_on_stdout(program, folder, redirection, loud):
    done = program(redirection, *loud, "generate", folder, "-p", "hi", "-n", "-3")
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


@pytest.mark.parametrize(("redirection", "reason"), [(">&-", "Bad file"), (">/dev/full", "No space left")])
@pytest.mark.parametrize("arguments", [["--version"], ["list"], ["generate"]])
def test_where_stdout_cannot_be_written_the_program_says_so(program, folder, redirection, reason, arguments):
    """Exit code 3 with an error and a hint, and nothing that looks like a fault of the program."""
    more = ["-q", str(folder), *REPLY] if arguments == ["generate"] else []
    done = program(redirection, *arguments, *more)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 3
    assert len(lines) == 2
    assert lines[0].startswith(f"error: stdout cannot be written: {reason}")
    assert lines[1].startswith("hint: ")


def test_a_closed_stdin_is_a_prompt_that_cannot_be_read(program, folder):
    done = program("<&-", "generate", folder)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: stdin cannot be read")
    assert program("<&-", "generate", folder, *REPLY).returncode == 0


def test_a_prompt_of_utf_8_is_read_in_a_locale_that_is_not(program, folder):
    """Streams: UTF-8 whatever the locale; the bytes of the argument are what counts."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    arguments = ["-q", "generate", folder, "--raw", "-p", "h\u00e9", "-n", "3", "--json"]
    here, there = (json.loads(program("", *arguments, **env).stdout) for env in ({}, ascii_only))
    assert there["prompt_token_ids"] == here["prompt_token_ids"]
    assert there["text"] == here["text"]


def test_a_name_that_is_not_utf_8_is_an_escape_in_the_json(program, folder):
    done = program("", "-q", "generate", folder, *REPLY, "--json", "-a", os.fsdecode(b"n\xff"))
    assert done.returncode == 0
    assert json.loads(done.stdout.decode("utf-8"))["model"] == "n\udcff"


def test_every_error_line_has_its_hint(folder, tmp_path, capsys, monkeypatch):
    """1.3: one line `error:`, then one line `hint:`, also where the error names no next step."""
    monkeypatch.setenv("MLXCEL_CACHE_DIR", str(tmp_path))
    (tmp_path / "messages").write_text("[]")
    damaged = write_tiny_llama(tmp_path / "damaged", config_overrides={"rope_theta": -1})
    for code, arguments in (
        (2, ["generate", folder, "-p", "hi", "-n", "-3"]),
        (2, ["generate", folder, "--messages", tmp_path / "messages"]),
        (2, ["generate", "-m", "", "-p", "hi"]),
        (3, ["generate", damaged, "-p", "hi"]),
    ):
        assert main(["-q", *map(str, arguments)]) == code
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(":")[0] for line in lines] == ["error", "hint"], arguments


@pytest.mark.parametrize("key", ["model", "chat_template_file", "generation_config", "backend"])
def test_a_name_with_nul_in_a_configuration_file_is_refused(folder, tmp_path, capsys, monkeypatch, key):
    monkeypatch.setenv("MLXCEL_CACHE_DIR", str(tmp_path))
    Path(tmp_path, "c.toml").write_text(f'{key} = "a\\u0000b"\n')
    assert main(["generate", str(folder), "-p", "hi", "--config", str(tmp_path / "c.toml")]) == 2
    assert f"c.toml: {key} is 'a\\x00b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder", "is a path, and a name is needed"),
        ("link", "is a link to nothing"),
        ("pipe", "is neither a file nor"),
    ],
)
def test_what_is_there_is_never_said_not_to_exist(tmp_path, capsys, monkeypatch, name, words):
    monkeypatch.setenv("MLXCEL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    command = ["download"] if name == "folder" else ["generate", "-p", "hi", "-m"]
    assert main([*command, str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


def test_a_user_without_a_home_is_told_what_to_set_and_needs_none_otherwise(tmp_path, monkeypatch):
    """Containers run as users without a password entry, for whom Python finds no home."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(UsageError, match="HOME is not set") as caught:
        EngineConfig.resolve(environ={})
    assert "MLXCEL_CACHE_DIR" in caught.value.hint
    assert EngineConfig.resolve(environ={"MLXCEL_CACHE_DIR": str(tmp_path)}).store_root == tmp_path / "models"


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path, monkeypatch):
    def looked_into(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", looked_into)
    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read: Permission denied"):
        open_checkpoint(tmp_path, PluginManager.load(only=(), trace=None))


def test_doctor_tells_of_a_store_that_may_not_be_looked_at(tmp_path, capsys, monkeypatch):
    """1.8: a store that cannot be used is a line with a hint, and the checks behind it are made."""
    exists = Path.exists

    def looked_at(path):
        if path.name == "models":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setenv("MLXCEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Path, "exists", looked_at)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "models cannot be written to: Permission denied" in told
    assert "default model" in told
