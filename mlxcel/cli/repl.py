"""The conversation at a terminal: lines in, replies out, until the user leaves (docs/spec/clients.md 1.7)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from mlxcel.cli.context import CliContext
from mlxcel.cli.dialogue import Dialogue, Message
from mlxcel.cli.interrupts import INTERRUPTED, interrupts_to
from mlxcel.cli.one_reply import Layers, Printing, log_settings, make_spec, print_end, resolve, resolve_for
from mlxcel.cli.prompt_input import PromptInput
from mlxcel.cli.repl_input import Called, help_lines, parse, setting
from mlxcel.cli.scheduled_reply import ReplyBell, answer
from mlxcel.cli.streams import tell, tell_error
from mlxcel.errors import ContextTooLong, MlxcelError, TemplateError, UsageError

if TYPE_CHECKING:
    from mlxcel.core.resolve_sampling import Resolved
    from mlxcel.core.result import RequestResult
    from mlxcel.serve_engine import Serving

LEAVE_WITHIN: Final = 2.0
"""Seconds between two Ctrl-C at the prompt of which the second one leaves."""

_NO_QUESTION: Final = "there is no message of yours in this conversation"


class Editor(Protocol):
    """Where lines come from: KeyboardInterrupt for Ctrl-C, EOFError at the end."""

    def read(self) -> str: ...


class Repl:
    """One conversation with one model. The replies go to stdout, everything else to stderr."""

    def __init__(
        self,
        context: CliContext,
        serving: Serving,
        editor: Editor,
        layers: Layers,
        *,
        strict: bool,
        printing: Printing,
        dialogue: Dialogue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """TemplateError for a model without a chat template: only that makes one prompt of many messages."""
        if serving.model.template is None:
            raise TemplateError(
                "the model has no chat template, so that a conversation cannot be made a prompt",
                hint="give one with --chat-template-file, or ask one thing with `mlxcel generate --raw`",
            )
        self._context, self._serving, self._editor, self._layers = context, serving, editor, layers
        self._strict, self._printing, self._dialogue, self._clock = strict, printing, dialogue, clock
        self._set: dict[str, Any] = {}
        self._turns = 0
        self._bell = ReplyBell()
        serving.model.observers.add(self._bell)

    def loop(self) -> int:
        """The exit code. Raises what is wrong with the values that the program was started with."""
        log_settings(self._context.config.origins, self._in_force(), self._serving.model)
        self._context.say(f"{self._serving.model.facts.name}: /help lists the commands, Ctrl-D leaves")
        interrupted: float | None = None
        while True:
            try:
                asked = parse(self._editor.read())
                if asked == Called("bye"):
                    return 0
                interrupted = None
                if isinstance(asked, Called):
                    self._call(asked)
                elif asked is not None:
                    self._say(asked)
            except EOFError:
                return 0
            except KeyboardInterrupt:
                now = self._clock()
                if interrupted is not None and now - interrupted <= LEAVE_WITHIN:
                    return INTERRUPTED
                interrupted = now
                tell("Ctrl-D leaves, or Ctrl-C once more")
            except MlxcelError as error:
                tell_error(error)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _call(self, called: Called) -> None:
        match called.name:
            case "help":
                tell("\n".join(help_lines()))
            case "clear":
                self._dialogue.clear()
            case "undo":
                if not self._dialogue.undo():
                    raise UsageError(_NO_QUESTION)
            case "regen":
                self._again()
            case "system":
                self._dialogue.set_system(called.argument)
            case "set":
                self._change(*setting(called.argument))
            case "show":
                self._show()
            case "save":
                self._dialogue.save(Path(called.argument).expanduser())
            case _:
                self._dialogue = Dialogue.load(Path(called.argument).expanduser())

    def _change(self, field: str, value: Any) -> None:
        """Taken if what comes of all values together can run."""
        changed = {name: kept for name, kept in self._set.items() if name != field}
        if value is not None:
            changed[field] = value
        before, self._set = self._set, changed
        try:
            resolved = self._in_force()
        except MlxcelError:
            self._set = before
            raise
        self._context.say(f"{field} = {getattr(resolved.params, field)} ({resolved.origin[field]})")

    def _show(self) -> None:
        resolved, model = self._in_force(), self._serving.model
        for name, origin in resolved.origin.items():
            tell(f"{name} = {getattr(resolved.params, name)} ({origin})")
        if not self._dialogue.messages:
            tell(f"no message yet; the context holds {model.facts.context} tokens")
            return
        from mlxcel.prepare import chat_prompt

        prompt = chat_prompt(model, self._dialogue.messages, kwargs=None, now=time.time())
        tell(f"prompt: {len(prompt.ids)} tokens of {model.facts.context}\n{prompt.text}")

    def _again(self) -> None:
        before = list(self._dialogue.messages)
        if not self._dialogue.reopen():
            raise UsageError(_NO_QUESTION)
        self._answer(before)

    # --- replies ------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        before = list(self._dialogue.messages)
        self._dialogue.say(text)
        self._answer(before)

    def _answer(self, before: list[Message]) -> None:
        """Answer the last message. What fails, or is stopped before a word was said, leaves the conversation as it was
        `before`."""
        try:
            with interrupts_to(self._bell.stop, leave_at_second=False):
                result = self._reply()
        except ContextTooLong as error:
            error.hint = "/undo drops the last exchange, /clear begins anew"
            self._dialogue.messages = before
            raise
        except MlxcelError:
            self._dialogue.messages = before
            raise
        if result.cause == "cancelled" and not result.text:
            self._dialogue.messages = before
            self._context.say("nothing was said: the conversation is as it was")
        else:
            self._dialogue.answer(result.text)

    def _reply(self) -> RequestResult:
        model, printing, progress = self._serving.model, self._printing, self._context.progress()
        resolved = resolve(self._all_layers(), strict=self._strict)
        self._turns += 1
        spec = make_spec(PromptInput(self._dialogue.messages), model, resolved, f"run-{self._turns}")
        output = printing.output(spec)
        listening = output if printing.streams else None
        result = answer(self._serving.scheduler, spec, resolved, self._bell, listening, progress)
        print_end(self._context, model, result, printing, output)
        return result

    def _in_force(self) -> Resolved:
        """The values, once it is known that they can run here; those that cannot act are said."""
        from mlxcel.core.bind_params import Caps, bind_params

        model = self._serving.model
        resolved = resolve_for(self._context, model, (*self._layers, ("request", self._set)), strict=self._strict)
        bound = bind_params(
            resolved.params,
            vocab=model.facts.vocab,
            tokenizer=model.tokenizer,
            eos_ids=model.ends.ids,
            prompt_length=0,
            context=model.facts.context,
            caps=Caps(max_n=1),
        )
        return attrs.evolve(resolved, params=bound)

    def _all_layers(self) -> Layers:
        model = self._serving.model
        return (("generation_config", model.defaults.sampling), *self._layers, ("request", self._set))
