"""`mlxcel run` (docs/spec/clients.md 1.2 to 1.7): one turn in this process, conversations in a pseudo-terminal."""

from __future__ import annotations

import itertools
import json
import signal
import stat
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from cli_runs import Cli
from echo_backend import PLUGIN
from plugin_doubles import Installer
from terminal import Terminal, terminal
from tiny_checkpoint import write_json, write_tiny_llama

from mlxcel.cli.scheduled_reply import STOP, ReplyBell

ECHO = ("run", "tiny", "--backend", "echo")
HI = "user\nhi\nassistant\n"
"""What the model `tiny` is fed for a conversation of one "hi", special tokens left out."""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    return Cli(monkeypatch, capfdbinary)


@pytest.fixture
def echo(third_party: Installer) -> Path:
    """The folder of the backend that repeats its prompt."""
    third_party.install("echo", PLUGIN)
    return third_party.folder


class Talks:
    """Conversations with the echoing model; `environ` may be added to before one begins."""

    def __init__(self, site: Path, folder: Path) -> None:
        self.state = folder / "state"
        self.environ = {"MLXCEL_MODELS_DIR": str(folder / "store"), "XDG_STATE_HOME": str(self.state)}
        self._paths = (site, Path(__file__).parent.parent)

    def __call__(self, *arguments: object) -> AbstractContextManager[Terminal]:
        return terminal(*ECHO, *arguments, environ=self.environ, paths=self._paths)


@pytest.fixture
def talks(echo: Path, tmp_path: Path) -> Talks:
    return Talks(echo, tmp_path)


# --- one turn ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [("-s", 0), ("-t", "0.9", "-s", 11)])
def test_one_turn_is_generates_reply(cli: Cli, tmp_path: Path, sampling: tuple[object, ...]) -> None:
    """The same messages and values: the same ids, from a flag, a file, a pipe and a conversation."""
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    conversation = tmp_path / "messages.json"
    conversation.write_text('[{"role": "user", "content": "hello"}]')
    options = ("tiny", "-n", 12, "--json", "-q", *sampling)
    wanted = json.loads(cli("generate", *options, "-p", "hello").out)
    for ran in (
        cli("run", *options, "-p", "hello"),
        cli("run", *options, "-f", file),
        cli("run", *options, stdin=b"hello\n"),
        cli("run", *options, "--messages", conversation),
    ):
        reply = json.loads(ran.out)
        assert (ran.code, list(reply)) == (0, list(wanted))
        for key in ("text", "token_ids", "prompt_token_ids", "finish_cause", "sampling", "usage", "model", "backend"):
            assert reply[key] == wanted[key]
        assert list(reply["timings"]) == list(wanted["timings"])
        assert reply["details"]["kv_storage"] == "dense"


def test_stdout_is_the_text_and_one_newline(cli: Cli, echo: Path) -> None:
    assert cli(*ECHO, "-p", "hi").out == f"{HI}\n"
    assert cli(*ECHO, "-p", "hi", "--no-stream").out == f"{HI}\n"
    assert cli(*ECHO, "-p", "hi", "--no-newline").out == HI
    assert cli(*ECHO, "-p", "hi", "-q").err == ""
    assert "· eos · echo/cpu" in cli(*ECHO, "-p", "hi").err
    assert cli(*ECHO, "-p", "hi", "--system", "be").out == f"system\nbe\n{HI}\n"


def test_zero_tokens_are_a_newline(cli: Cli) -> None:
    ran = cli("run", "tiny", "-p", "hello", "-n", 0)
    assert (ran.code, ran.out) == (0, "\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", "a", "-f", "b"), "-p and -f exclude each other"),
        (("-p", "a", "--parallel", 2), "no such option '--parallel'"),
        (("-p", "a", "--raw"), "no such option '--raw'"),
        (("-p", "a", "--token-ids", "1"), "no such option '--token-ids'"),
        (("-p", "a", "-t", "101"), "temperature must be"),
        (("-p", "a", "--top-k", "40", "--strict"), "top_k has no effect"),
        (("-p", "a", "--add-special"), "--add-special does nothing"),
        (("-p", "a", "--chat-template", "{{", "--chat-template-file", "b"), "are both given"),
        (("-p", "a", "--page-size", "0"), "--page-size"),
        (("-p", "x" * 3000, "-c", 64), "the context holds 64"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(cli: Cli, arguments: tuple[object, ...], words: str) -> None:
    ran = cli("run", "tiny", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert "hint: " in ran.err


def test_the_variable_of_rows_is_not_read_and_the_schedulers_are(cli: Cli) -> None:
    options = ("run", "tiny", "-p", "hello", "-n", 1, "--json", "-q")
    assert cli(*options, MLXCEL_PARALLEL="many").code == 0
    assert cli(*options, MLXCEL_PAGE_SIZE="many").code == 2
    assert cli("generate", *options[1:], MLXCEL_PAGE_SIZE="many").code == 0


def test_one_turn_uses_no_prompt_cache_unless_it_is_asked_for(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/spec/clients.md 0.2: off for `run -p`."""
    file = tmp_path / "kept"
    options = ("run", "tiny", "-p", "hello " * 20, "-n", 1, "-q", "--prompt-cache-file", file)
    assert cli(*options).code == 0
    assert not file.exists()
    assert cli(*options, "--prompt-cache").code == 0
    assert file.exists()


def test_a_failed_row_ends_with_3(cli: Cli, echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("no text today")

    monkeypatch.setattr("mlxcel.plugins.finish.standard.StandardFinish.resolve", broken)
    ran = cli(*ECHO, "-p", "hi")
    assert ran.code == 3
    assert "no text today" in ran.err


def test_h_s1_an_interrupt_ends_one_turn_and_keeps_what_was_said(talks: Talks) -> None:
    """H-S1, docs/spec/clients.md 1.4: cancelled, a newline, statistics, exit 130."""
    with talks("-p", "slow " + "a" * 400) as program:
        program.wait_for("user\nslow", out=True)
        program.type("\x03")
        program.wait_for("cancelled")
        assert program.end() == 130
    assert program.said.startswith(b"user\nslow")
    assert program.said.endswith(b"\n")
    assert len(program.said) < 400


def test_an_interrupt_with_json_gives_the_object(cli: Cli, echo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waits = ReplyBell.wait, itertools.count()

    def stopped(bell: ReplyBell) -> int:
        return STOP if next(waits) == 3 else wait(bell)

    monkeypatch.setattr(ReplyBell, "wait", stopped)
    ran = cli(*ECHO, "-p", "slow " + "a" * 400, "--json")
    reply = json.loads(ran.out)
    assert (ran.code, reply["finish_cause"], reply["finish_reason"]) == (130, "cancelled", None)
    assert f"user\nslow {'a' * 399}".startswith(reply["text"])


@pytest.mark.parametrize(("form", "origin"), [((), "default"), (("--generation-config", "auto"), "generation_config")])
def test_h_c8_the_models_own_sampling_counts_only_when_asked_for(
    cli: Cli, tmp_path: Path, form: tuple[str, ...], origin: str
) -> None:
    """H-C8: what was applied is what is reported, here and in `generate`."""
    model = write_tiny_llama(tmp_path / "model")
    write_json(model / "generation_config.json", {"temperature": 0.5, "top_k": 3, "do_sample": True, "eos_token_id": 1})
    for command in ("run", "generate"):
        reply = json.loads(cli(command, model, "-p", "hello", "-n", 1, "--json", "-q", *form).out)
        assert reply["sampling"]["temperature"] == (0.5 if form else 0)
        assert reply["sampling"]["origin"]["temperature"] == origin


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (("-p", "a", "-f", "b"), ("-p", "-f")),
        (("-p", "a", "--messages", "b"), ("-p", "--messages")),
        (("--messages", "b", "--system", "c"), ("--messages", "--system")),
        (("-p", "a", "-q", "-v"), ("-q", "-v")),
        (("-p", "a", "--mirostat", 2, "--samplers", "top_k"), ("--mirostat", "--samplers")),
        (("-p", "a", "--chat-template", "x", "--chat-template-file", "y"), ("--chat-template", "--chat-template-file")),
        (("-p", "a", "--temprature", 1), ("--temprature", "--temperature")),
    ],
)
def test_h_s4_flags_that_exclude_each_other(cli: Cli, arguments: tuple[object, ...], flags: tuple[str, str]) -> None:
    """H-S4: both are named, before a model is loaded."""
    ran = cli("run", "/no/such/model", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert all(flag in ran.err for flag in flags)
    assert "/no/such/model" not in ran.err


def test_h_s3_a_missing_model_is_one_line(cli: Cli) -> None:
    ran = cli("run", "/no/such/model", "-p", "a", "-q")
    assert (ran.code, ran.out) == (2, "")
    error, hint = ran.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


def test_h_s1_a_second_interrupt_ends_the_program_at_once() -> None:
    script = """
import os, signal
from mlxcel.cli.interrupts import interrupts_to
heard = []
with interrupts_to(lambda: heard.append(1), leave_at_second=True):
    os.kill(os.getpid(), signal.SIGINT)
    print(len(heard), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("never")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "1\n", "")


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_and_its_prompt_is_kept(talks: Talks) -> None:
    """The second turn is fed the first one and takes its KV from the prompt cache; Ctrl-D leaves with 0."""
    with talks("--system", "be brief, and kind, and never say more than is needed") as program:
        program.wait_for("/help lists the commands")
        program.line("first")
        program.wait_for("(0 cached)")
        program.line("second")
        program.wait_for("prompt (")
        program.wait_for("eos")
        program.wait_for(">")
        program.type("\x04")
        assert program.end() == 0
    first = "system\nbe brief, and kind, and never say more than is needed\nuser\nfirst\nassistant\n"
    assert program.said.decode() == f"{first}\n{first}{first}\nuser\nsecond\nassistant\n\n"
    cached = [int(line.split("(")[1].split()[0]) for line in program.seen.splitlines() if " cached) · " in line]
    assert cached[0] == 0
    assert cached[1] >= len(first) // 2


def test_an_interrupt_stops_the_reply_and_not_the_program(talks: Talks) -> None:
    """What was said stays in the conversation. At the prompt the first Ctrl-C says how to leave, the second leaves."""
    with talks() as program:
        program.wait_for(">")
        program.line("slow " + "a" * 300)
        program.wait_for("user\nslow", out=True)
        program.type("\x03")
        program.wait_for("cancelled")
        partial = program.said.decode().removesuffix("\n")
        program.wait_for(">")
        program.line("/show")
        program.wait_for("prompt: ")
        program.wait_for(partial.splitlines()[-1])
        program.wait_for(">")
        program.type("half a line\x03")
        program.wait_for("Ctrl-D leaves, or Ctrl-C once more")
        program.line("/clear")
        program.line("hi")
        program.wait_for("eos")
        program.wait_for(">")
        program.type("\x03")
        program.wait_for("Ctrl-D leaves, or Ctrl-C once more")
        program.type("\x03")
        assert program.end() == 130
    assert program.said.decode().endswith(f"\n{HI}\n")  # the half line was cleared, and so was the conversation


def test_messages_of_several_lines(talks: Talks) -> None:
    """Three quotes open and close one; Alt-Enter is a newline in any."""
    with talks() as program:
        program.wait_for(">")
        program.line('"""one')
        program.line("two")
        program.line('three"""')
        program.wait_for("eos")
        program.line("/clear")
        program.type("four\x1b\rfive\r")
        program.wait_for("eos")
        program.line("/bye")
        assert program.end() == 0
    assert program.said.decode() == "user\none\ntwo\nthree\nassistant\n\nuser\nfour\nfive\nassistant\n\n"


def test_the_history_is_a_file_of_its_owner_alone(talks: Talks) -> None:
    with talks() as program:
        program.wait_for(">")
        program.line("/set temprature 1")
        program.wait_for("did you mean 'temperature'?")
        program.line("hi")
        program.wait_for("eos")
        program.line("/exit")
        assert program.end() == 0
    file = talks.state / "mlxcel" / "run-history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "hi" in file.read_text()
    with talks() as program:
        program.wait_for(">")
        program.type("\x1b[A\x1b[A\r")  # up, up, Enter: the line before the last
        program.wait_for("eos")
        program.wait_for(">")
        program.type("\x04")
        assert program.end() == 0
    assert program.said.decode() == f"{HI}\n"


def test_without_a_history_none_is_written(talks: Talks) -> None:
    with talks("--no-history") as program:
        program.wait_for(">")
        program.line("hi")
        program.wait_for("eos")
        program.wait_for(">")
        program.type("\x04")
        assert program.end() == 0
    assert not talks.state.exists()


@pytest.mark.parametrize("flag", ["--json", "--no-newline"])
def test_flags_of_one_reply_are_refused_in_a_conversation(talks: Talks, flag: str) -> None:
    with talks(flag) as program:
        assert program.end() == 2
    assert f"error: {flag} is for one reply" in program.seen
    assert "loading" not in program.seen


def test_an_interrupt_from_outside_stops_a_reply(talks: Talks) -> None:
    """A signal is as good as a key."""
    with talks() as program:
        program.wait_for(">")
        program.line("slow " + "a" * 300)
        program.wait_for("user\nslow", out=True)
        program.signal(signal.SIGINT)
        program.wait_for("cancelled")
        program.line("/bye")
        assert program.end() == 0
