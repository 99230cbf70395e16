"""What the conversation of `mlxcel run` understands (docs/spec/clients.md 1.7), line by line, with a model that repeats
what it is fed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import pytest
from cli_runs import Ran
from echo_backend import PLUGIN
from other_threads import PATIENCE
from plugin_doubles import Installer

from mlxcel.cli.context import CliContext
from mlxcel.cli.dialogue import Dialogue
from mlxcel.cli.main import main
from mlxcel.cli.repl_input import COMMANDS, Called, parse, setting
from mlxcel.cli.scheduled_reply import ReplyBell, answer
from mlxcel.core.events import Delta, Ended
from mlxcel.core.outbox import Outbox
from mlxcel.core.param_table import FIELDS
from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Piece, PrefillPlan, Span, StepReport
from mlxcel.core.reply import Reply
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.resolve_sampling import Resolved
from mlxcel.core.result import RequestResult
from mlxcel.errors import RequestError, UnsupportedField, UsageError

Line = str | type[BaseException]
Talk = Callable[..., Ran]

HI = "user\nhi\nassistant\n"


class Typed:
    """An editor whose lines are given; behind the last one the input ends."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = iter(lines)

    def read(self) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


class Keyboard:
    """A stdin that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def talk(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    third_party: Installer,
) -> Talk:
    """A conversation of these lines."""
    third_party.install("echo", PLUGIN)
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(sys, "stdin", Keyboard())

    def run(*lines: Line, options: Sequence[object] = ()) -> Ran:
        monkeypatch.setattr("mlxcel.cli.line_editor.LineEditor", lambda history: Typed(lines))
        code = main(["run", "tiny", "--backend", "echo", *map(str, options)])
        captured = capfdbinary.readouterr()
        return Ran(code, captured.out.decode(), captured.err.decode())

    return run


# --- the conversation -------------------------------------------------------------------------------------------------


def test_turns_are_fed_with_all_before_them(talk: Talk) -> None:
    ran = talk("hi", "", "   ", "you")
    assert (ran.code, ran.out) == (0, f"{HI}\n{HI}{HI}\nuser\nyou\nassistant\n\n")


def test_undo_clear_and_system(talk: Talk) -> None:
    ran = talk("hi", "no", "/undo", "/system be brief", "you", "/clear", "hi", "/system", "/undo", "hi")
    assert ran.out == "\n".join(
        [
            HI,
            f"{HI}{HI}\nuser\nno\nassistant\n",
            f"system\nbe brief\n{HI}{HI}\nuser\nyou\nassistant\n",
            f"system\nbe brief\n{HI}",
            HI,
            "",
        ]
    )
    assert "error" not in ran.err


def test_regen_answers_the_last_message_again(talk: Talk) -> None:
    ran = talk("/set temperature 1", "hi", "/regen", "/regen")
    assert ran.out == f"{HI}\n" * 3
    assert "there is no message of yours" in talk("/regen").err
    assert "there is no message of yours" in talk("/undo").err


def test_save_and_load(talk: Talk, tmp_path: Path) -> None:
    """The file is a conversation that --messages reads, too; none is overwritten."""
    file = tmp_path / "saved.json"
    first = talk("/system be", "hi", f"/save {file}", f"/save {file}")
    assert f"error: {file} is there already" in first.err
    assert [message["role"] for message in json.loads(file.read_text())] == ["system", "user", "assistant"]
    went_on = talk("/system be", "hi", "more").out.removeprefix(first.out)
    assert talk(f"/load {file}", "more").out == went_on
    assert talk(f"/load {file}", "/regen").out == first.out


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"role": "user"}]', "[]", '[{"content": "a"}]', "\udcff"])
def test_a_file_that_is_no_conversation_changes_nothing(talk: Talk, tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    ran = talk("hi", f"/load {file}", "/load /nowhere/at/all", "you")
    assert ran.err.count("error: ") == 2
    assert ran.out == talk("hi", "you").out


def test_show_tells_values_prompt_and_counts(talk: Talk) -> None:
    ran = talk("/show", "hi", "/set top_k 7", "/set temperature 0.5", "/show", options=("-n", 100))
    before, after = ran.err.split("top_k = 7 (request)")[0], ran.err
    assert "no message yet; the context holds 2048 tokens" in before
    assert "max_tokens = 100 (flag)" in before
    assert "temperature = 0.5 (request)" in after
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" in after
    for field in FIELDS:
        assert f"\n{field.name} = " in before
    assert ran.out == f"{HI}\n"  # stdout is replies alone


def test_a_value_is_taken_checked_and_taken_back(talk: Talk) -> None:
    ran = talk(
        "/set max_tokens 3", "hi", "/set max_tokens 9999999999999999999999", "/regen", "/set max_tokens", "/regen"
    )
    assert ran.out == f"use\nuse\n{HI}\n"
    assert "error: max_tokens must be an integer" in ran.err
    assert "max_tokens = -1 (default)" in ran.err


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("temprature 1", "did you mean 'temperature'?"),
        ("temperature 101", "temperature must be a number from 0 to 100"),
        ("temperature nan", "temperature must be a number"),
        ("temperature NaN", "temperature must be a number"),
        ("temperature true", "temperature must be a number"),
        ("stop_token_ids 999999", "is not in the vocabulary"),
        ("min_tokens 99999", "min_tokens of 3 or less"),
        ("grammar root", "grammar is not supported"),
        ("n 2", "n does nothing here"),
        ("logprobs 2", "logprobs does nothing here"),
        ("add_special_tokens true", "the chat template writes its own"),
        ("samplers nonsense", "samplers must be"),
    ],
)
def test_a_bad_value_leaves_all_as_it_was(talk: Talk, value: str, words: str) -> None:
    ran = talk("/set max_tokens 3", f"/set {value}", "hi")
    assert "error: " in ran.err
    assert words in ran.err
    assert (ran.code, ran.out) == (0, "use\n")


def test_values_that_cannot_act_are_said_and_with_strict_refused(talk: Talk) -> None:
    assert "warning: top_k has no effect: the reply is greedy" in talk("/set top_k 5").err
    ran = talk("/set top_k 5", "/set max_tokens 3", "hi", options=("--strict",))
    assert "error: top_k has no effect" in ran.err
    assert ran.out == "use\n"


def test_what_no_longer_fits_is_refused_with_the_numbers(talk: Talk) -> None:
    """Never cut: the message is dropped and the conversation goes on."""
    ran = talk("hi", "a" * 300, "/undo", "you", options=("-c", 128))
    assert "the context holds 128" in ran.err
    assert "hint: /undo drops the last exchange, /clear begins anew" in ran.err
    assert ran.out == f"{HI}\nuser\nyou\nassistant\n\n"


def test_a_failed_reply_leaves_the_conversation_as_it_was(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxcel.plugins.finish.standard import StandardFinish

    resolve = StandardFinish.resolve

    def broken(finish: StandardFinish, state: object, token: int) -> object:
        if token == ord("!"):
            raise RuntimeError("no text today")
        return resolve(finish, state, token)  # type: ignore[arg-type]

    monkeypatch.setattr(StandardFinish, "resolve", broken)
    ran = talk("hi", "what!", "you")
    assert "no text today" in ran.err
    assert ran.out == f"{HI}\n{HI}{HI}\nuser\nwhat\n{HI}{HI}\nuser\nyou\nassistant\n\n"


def test_a_reply_that_is_stopped_before_a_word_is_no_exchange(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter(("cancelled", "eos"))

    def stopped(scheduler: Any, spec: Any, resolved: Any, bell: Any, output: Any, progress: Any) -> RequestResult:
        cause = next(results)
        result = answer(scheduler, spec, resolved, bell, None if cause == "cancelled" else output, progress)
        return attrs.evolve(result, cause=cause, text="") if cause == "cancelled" else result

    monkeypatch.setattr("mlxcel.cli.repl.answer", stopped)
    ran = talk("no", "hi")
    assert "nothing was said: the conversation is as it was" in ran.err
    assert ran.out == f"\n{HI}\n"


def test_ctrl_c_at_the_prompt_leaves_only_within_two_seconds(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxcel.cli.repl import Repl

    interrupt = KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr("mlxcel.cli.repl.LEAVE_WITHIN", PATIENCE)
        assert talk(interrupt, interrupt, "hi").code == 130
        assert talk(interrupt, "hi", interrupt).code == 0
    times = iter((10.0, 12.1, 14.0))
    made = Repl.__init__

    def slowly(repl: Repl, *arguments: object, **options: object) -> None:
        made(repl, *arguments, clock=lambda: next(times), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Repl, "__init__", slowly)
    ran = talk(interrupt, interrupt, interrupt, "hi")
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.count("Ctrl-D leaves, or Ctrl-C once more") == 2


def test_a_model_without_a_template_is_refused(talk: Talk, tmp_path: Path) -> None:
    assert talk().code == 0
    for file in (tmp_path / "store" / "tiny").glob("*"):
        if "template" in file.name:
            file.unlink()
        elif file.name == "tokenizer_config.json":
            values = json.loads(file.read_text())
            values.pop("chat_template", None)
            file.write_text(json.dumps(values))
    ran = talk("hi", options=("-m", tmp_path / "store" / "tiny"))
    assert ran.code == 2


def test_quiet_shows_replies_alone(talk: Talk) -> None:
    ran = talk("hi", "/set temperature 0.5", options=("-q",))
    assert (ran.out, ran.err) == (f"{HI}\n", "")


class Told:
    """A progress that writes down what it is told."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self.all.append((phase, total, unit))

    def advance(self, done: int) -> None:
        self.all.append((done,))

    def finish(self) -> None:
        self.all.append(())


def test_each_prompt_has_its_progress(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(CliContext, "progress", lambda context: told)
    talk("a" * 300, "b", options=("--prefill-chunk", 128))
    prompts = [place for place, entry in enumerate(told.all) if entry[:1] == ("prefill",)]
    assert [told.all[place][1:] for place in prompts] == [(319, "tokens"), (657, "tokens")]
    assert all(() in told.all[place:] for place in prompts)


def test_progress_is_what_steps_have_read_and_over_with_the_first_token() -> None:
    """Told by the engine's reports; a token that comes later than that ends it."""
    told, bell, outbox = Told(), ReplyBell(), Outbox(1)
    plan = PrefillPlan(b"", 100, (Span(100, 228, 128), Span(228, 300, 128)), "R2")
    came: list[Callable[[], object]] = [
        lambda: bell.step_finished(StepReport(1, (Piece(0, plan, 0),), (), 128, {})),
        lambda: bell.step_finished(StepReport(2, (Piece(0, plan, 1),), (), 72, {})),
        lambda: outbox.put(Delta(0, "a", token_ids=(1,))),
        lambda: outbox.end(Ended(0, cast("Any", "result"))),
    ]

    class Stepping(ReplyBell):
        def wait(self) -> int:
            came.pop(0)()
            return bell.wait()

        def listen(self, reply: Reply) -> None:
            bell.listen(reply)

    class Accepting:
        def submit(self, request: Request) -> Reply:
            return Reply("r", 1, outbox, lambda: None)

    spec = SequenceSpec("r", np.arange(300, dtype=np.int32), SamplingParams(seed=0))
    result = answer(cast("Any", Accepting()), spec, Resolved(spec.params, {}), Stepping(), None, told)
    assert cast("Any", result) == "result"
    assert told.all == [("prefill", 300, "tokens"), (228,), (300,), (), ()]


def test_ids_of_each_reply_where_they_are_asked_for(talk: Talk) -> None:
    assert f"token ids: {' '.join(map(str, HI.encode()))}\n" in talk("hi", options=("--print-token-ids",)).err


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("  hi there ", "hi there"),
        ("\n", None),
        ("/help", Called("help")),
        ("/exit", Called("bye")),
        ("/system  a  b ", Called("system", "a  b")),
        ('"""/help\nme"""', "/help\nme"),
        ('"""\na\n"""', "a"),
        ('""""""', None),
        ("say /help", "say /help"),
    ],
)
def test_lines(line: str, meant: str | Called | None) -> None:
    assert parse(line) == meant


@pytest.mark.parametrize(
    ("line", "words"),
    [("/hepl", "no command /hepl"), ("/", "no command /"), ("/save", "needs FILE"), ("/clear all", "takes nothing")],
)
def test_commands_that_there_are_none_of(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(line)


def test_help_names_every_command(talk: Talk) -> None:
    ran = talk("/help")
    for name in COMMANDS:
        assert f"/{name}" in ran.err


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("temperature 0.7", "temperature", 0.7),
        ("repeat_penalty 1.1", "repetition_penalty", 1.1),
        ("max_completion_tokens 5", "max_tokens", 5),
        ("stop END", "stop", ("END",)),
        ("stop 5", "stop", ("5",)),
        ("stop null", "stop", None),
        ('stop ["a", "b"]', "stop", ("a", "b")),
        ("ignore_eos on", "ignore_eos", True),
        ('logit_bias {"3": 1}', "logit_bias", ((3, 1.0),)),
        ("logit_bias [[3, false]]", "logit_bias", ((3, None),)),
        ("stop_token_ids 3", "stop_token_ids", (3,)),
        ('samplers ["top_k"]', "samplers", ("top_k",)),
        ("seed", "seed", None),
    ],
)
def test_settings(line: str, field: str, value: object) -> None:
    assert setting(line) == (field, value)


def test_settings_that_are_not_honoured() -> None:
    with pytest.raises(UnsupportedField):
        setting('response_format {"type": "json_object"}')
    with pytest.raises(RequestError):
        setting("top_k 1.5")


def test_a_dialogue_undoes_from_its_last_question() -> None:
    dialogue = Dialogue([{"role": "system", "content": "s"}])
    assert not dialogue.undo()
    dialogue.say("a")
    dialogue.answer("b")
    dialogue.say("c")
    assert dialogue.undo()
    assert [message["content"] for message in dialogue.messages] == ["s", "a", "b"]
    assert dialogue.reopen()
    assert [message["content"] for message in dialogue.messages] == ["s", "a"]
