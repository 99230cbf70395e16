"""LLM: prompts in, replies out (docs/spec/clients.md 2)."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mlxcel.asked import AskedPrompt, asked_conversations, asked_prompt, asked_prompts, indexed, own, paired, placed
from mlxcel.client import Came, Connected, Sent
from mlxcel.conversation import Conversation
from mlxcel.errors import MlxcelError

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams
    from mlxcel.core.source import Progress
    from mlxcel.outputs import RequestOutput, StreamDelta


class LLM(Connected):
    """A model, and a thread that runs it. Methods may be called from several threads: their rows share batches.

    `model` is a folder, a .gguf file or a name, None for the default model; keywords are the engine options of
    docs/python.md, `tokenizer` a folder, a file or a Tokenizer to take in place of the model's own. `progress` shows
    bars on stderr, of loading and of every call that does not say otherwise. With `base_url` there is no model here:
    the same methods ask the `mlxcel serve` that is there, with `api_key` if it wants one; `model` is a name it serves.
    Raises the errors of mlxcel.errors for what cannot be obeyed or loaded, TypeError for a keyword there is none of.
    """

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Replies to texts as they are, or to ids: one output a prompt, in the order of the prompts.

        A prompt is a text, a list of ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; a list may mix them. Every
        prompt and parameter is checked before any is run: RequestError, a ValueError, whose message and `index` say
        which. A row that fails leaves the others alone; when all have ended its error is raised, with `index` and all
        `outputs`, or with `on_error="return"` it is the `error` of its output. KeyboardInterrupt cancels the rows.
        """
        self._client.check_open()
        asked, listed = asked_prompts(prompts)
        return self._run(asked, sampling_params, "prompts" if listed else None, progress, on_error)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        progress: bool | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Replies to a conversation or a list of them, in the model's chat template or the one given here. Otherwise as
        `generate`. To continue the assistant's last message set `continue_final_message`, and `add_generation_prompt`
        to false."""
        self._client.check_open()
        conversations, listed = asked_conversations(messages)
        options = (add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs, tools)
        asked = [Conversation(conversation, *options) for conversation in conversations]
        return self._run(asked, sampling_params, "conversations" if listed else None, progress, on_error)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """One prompt's reply as it comes. The prompt is checked now and runs from the first `next` on; leaving the loop
        cancels it. An error of the row is raised where the reply broke off."""
        self._client.check_open()
        return self._deltas(asked_prompt(prompt), sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Iterator[StreamDelta]:
        """As `stream`, of one conversation."""
        self._client.check_open()
        conversation = Conversation(
            messages, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs, tools
        )
        return self._deltas(conversation, sampling_params)

    def close(self) -> None:
        """Cancel what runs, end the engine's thread, free the model. Again: nothing."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- many ---------------------------------------------------------------------------------------------------------

    def _run(
        self,
        asked: Sequence[AskedPrompt | Conversation],
        params: Any,
        listed: str | None,
        progress: bool | None,
        on_error: str,
    ) -> list[RequestOutput]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error is {on_error!r}, it must be 'raise' or 'return'")
        prepared = []
        resolved: dict[int, Any] = {}  # by the identity of what was given
        for index, (each, its) in enumerate(zip(asked, paired(params, len(asked)), strict=True)):
            try:
                if id(its) not in resolved:
                    resolved[id(its)] = self._client.resolve(its)
                prepared.append(self._client.prepare(each, resolved[id(its)]))
            except MlxcelError as error:
                raise placed(error, f"{listed}[{index}]" if listed else None, index) from None
        if not prepared:
            return []
        bar = self._client.progress(progress)
        bar.start("generate", len(prepared), "prompts")
        try:
            outputs = self._all(prepared, bar)
        finally:
            bar.finish()
        if on_error == "raise":
            for index, output in enumerate(outputs):
                if output.error is not None:
                    raise indexed(own(output.error), index, outputs)
        return outputs

    def _all(self, prepared: Sequence[Any], bar: Progress) -> list[RequestOutput]:
        """Feed the requests to the scheduler as places come free, and wait for all."""
        outputs: dict[int, RequestOutput] = {}
        waiting = deque(range(len(prepared)))
        running: dict[int, Sent] = {}
        gathered: dict[int, Came] = {}
        heard: deque[int] = deque()  # of which there are events
        bell = threading.Event()
        ring = bell.set

        def tell(index: int) -> None:
            heard.append(index)
            bell.set()

        try:
            while len(outputs) < len(prepared):
                bell.clear()
                while waiting:
                    index = waiting[0]
                    gathered[index] = self._client.gathered(prepared[index])
                    try:
                        begun = self._client.begin(prepared[index], ring, heard=partial(tell, index))
                    except MlxcelError as error:
                        outputs[index] = gathered.pop(index).refused(error)
                    else:
                        if begun is None:
                            break
                        running[index] = begun
                    waiting.popleft()
                while heard:
                    index = heard.popleft()
                    if index not in running:
                        continue
                    for event in running[index].events():
                        gathered[index].take(event)
                    if running[index].ended:
                        del running[index]
                        outputs[index] = gathered.pop(index).output()
                bar.advance(len(outputs))
                if len(outputs) < len(prepared):
                    bell.wait()
        finally:
            self._client.places.leave(ring)
            for left in running.values():
                left.cancel()
        return [outputs[index] for index in range(len(prepared))]

    # --- one ----------------------------------------------------------------------------------------------------------

    def _deltas(self, asked: AskedPrompt | Conversation, params: SamplingParams | None) -> Iterator[StreamDelta]:
        """Checked now."""
        return self._run_one(self._client.prepare(asked, self._client.resolve(paired(params, 1)[0])))

    def _run_one(self, prepared: Any) -> Iterator[StreamDelta]:
        bell, ending = threading.Event(), sys.is_finalizing  # by its own name: a program that ends clears modules
        ring = bell.set
        running = None
        try:
            while (running := self._client.begin(prepared, ring)) is None:
                bell.wait()
                bell.clear()
            gathered = self._client.gathered(prepared)
            for event in running:
                delta = gathered.take(event)
                if delta is None:
                    continue
                if delta.output is not None and delta.output.error is not None:
                    raise indexed(own(delta.output.error), 0, [delta.output])
                yield delta
        finally:
            if not ending():  # then other threads stopped where they were, and hold whatever locks they held
                self._client.places.leave(ring)
                if running is not None:
                    running.cancel()
