"""AsyncLLM (docs/spec/clients.md 2): many coroutines, aborts, cancelled tasks, loops that are left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import other_threads
import pytest
from llm_rows import BACKEND, ENDLESS, GREEDY, engine_threads, ids, mixed
from plugin_doubles import Installer
from script_llm import script_options
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM, AsyncLLM, RequestOutput, SamplingParams
from mlxcel.errors import EmptyPrompt, EngineError, RequestError, RowFault
from mlxcel.local_client import WAITING

PROMPTS = mixed(20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[RequestOutput]:
    """What each of PROMPTS gives by itself, each on an engine that has seen nothing."""
    with LLM(model, backend=BACKEND, enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]


def run(model: Path, work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncLLM(model, backend=BACKEND, **options) as llm:
            return await work(llm)

    return asyncio.run(main())


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    found = [output async for output in outputs]
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    return found[-1]


async def idle(llm: AsyncLLM) -> bool:
    return await asyncio.to_thread(other_threads.idle, llm)


def test_twenty_at_once_with_one_aborted_and_one_cancelled(model: Path, alone: list[RequestOutput]) -> None:
    """Test 5 of 2.3."""

    async def work(llm: AsyncLLM) -> None:
        aborted = asyncio.create_task(last(llm.generate("hello", ENDLESS, request_id="gone")))
        cancelled = asyncio.create_task(last(llm.generate("hello", ENDLESS)))
        tasks = [asyncio.create_task(last(llm.generate(prompt, GREEDY))) for prompt in PROMPTS[:18]]
        await tasks[0]
        cancelled.cancel()
        assert await llm.abort("gone")
        outputs = await asyncio.gather(*tasks)
        assert [ids(output) for output in outputs] == [ids(output) for output in alone[:18]]
        ended = await aborted
        assert (ended.outputs[0].finish_cause, ended.outputs[0].finish_reason, ended.error) == ("cancelled", None, None)
        assert not await llm.abort("gone")
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await idle(llm)

    run(model, work, max_num_seqs=3)


def test_more_requests_than_places_wait_for_them(model: Path, alone: list[RequestOutput]) -> None:
    async def work(llm: AsyncLLM) -> None:
        many = [index % 20 for index in range(2 * (WAITING + 2) + 5)]
        outputs = await asyncio.gather(*(last(llm.generate(PROMPTS[index], GREEDY)) for index in many))
        assert [ids(output) for output in outputs] == [ids(alone[index]) for index in many]

    run(model, work, max_num_seqs=2)


def test_an_abort_and_a_cancelled_task_reach_requests_that_wait_for_a_place(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        running = [asyncio.create_task(last(llm.generate("the", ENDLESS, f"r{n}"))) for n in range(WAITING + 1)]
        while llm.stats()["scheduler"]["num_requests_waiting"] < WAITING:
            await asyncio.sleep(0)
        first = asyncio.create_task(last(llm.generate("in", GREEDY, "first")))
        second = asyncio.create_task(last(llm.generate("in", GREEDY.clone(n=2), "second")))
        third = asyncio.create_task(last(llm.generate("in", GREEDY, "third")))
        while len(llm._client.places._waiting) < 3:
            await asyncio.sleep(0)
        first.cancel()
        assert await llm.abort("second")
        ended = await second
        assert [choice.finish_cause for choice in ended.outputs] == ["cancelled"] * 2
        assert (ended.finished, ended.error) == (True, None)
        for n in range(WAITING + 1):
            await llm.abort(f"r{n}")
        assert (await third).outputs[0].finish_cause == "max_tokens"
        for task in running:
            await task
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await idle(llm)

    run(model, work, max_num_seqs=1)


def test_outputs_grow(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=10, seed=4, n=2, logprobs=1)
        found = [output async for output in llm.generate("hello", params)]
        deltas = [delta async for delta in llm.stream("hello", params)]
        for choice in range(2):
            grown = [output.outputs[choice] for output in found]
            for before, after in pairwise(grown):
                assert after.text.startswith(before.text)
                assert after.token_ids[: len(before.token_ids)] == before.token_ids
                assert after.logprobs is not None
                assert before.logprobs is not None
                assert after.logprobs[: len(before.logprobs)] == before.logprobs
            own = [delta for delta in deltas if delta.index == choice]
            assert "".join(delta.text for delta in own) == grown[-1].text
            assert sum((delta.token_ids for delta in own), ()) == grown[-1].token_ids
        assert deltas[-1].output is not None
        assert deltas[-1].output.outputs == found[-1].outputs
        assert {output.request_id for output in found} == {found[0].request_id}

    run(model, work)


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_leaving_the_loop_cancels_the_row(model: Path, method: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        async for _ in getattr(llm, method)("hello", ENDLESS):
            break
        for _ in range(3):  # the loop closes what was left
            await asyncio.sleep(0)
        assert await idle(llm)
        assert llm.stats()["scheduler"]["request_finished_total"] == {"cancelled": 1}
        assert llm._reading == {}

    run(model, work)


def test_what_cannot_run_is_refused(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        for prompt, kind in ((5, RequestError), ([], EmptyPrompt), (["a", "b"], RequestError), ([320], RequestError)):
            with pytest.raises(kind):
                await last(llm.generate(prompt, GREEDY))
        with pytest.raises(TypeError):
            await last(llm.generate("a", {"temperature": 0}))
        for request_id in ("", "x" * 129, 5):
            with pytest.raises(RequestError, match="request_id"):
                await last(llm.generate("a", GREEDY, request_id))
        running = llm.generate("hello", ENDLESS, "one")
        assert (await anext(running)).request_id == "one"
        with pytest.raises(RequestError, match="'one' still runs"):
            await last(llm.generate("a", GREEDY, "one"))
        await running.aclose()
        assert (await last(llm.generate("a", GREEDY, "one"))).finished
        assert llm._reading == {}

    run(model, work)


def test_close_ends_what_runs(model: Path) -> None:
    before = engine_threads()

    async def main() -> None:
        llm = AsyncLLM(model, backend=BACKEND, max_num_seqs=1)
        tasks = [asyncio.create_task(last(llm.generate("hello", ENDLESS))) for _ in range(WAITING + 3)]
        while len(llm._client.places._waiting) < 2:
            await asyncio.sleep(0)
        await llm.close()
        await llm.close()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, EngineError | RuntimeError) for error in ended)
        with pytest.raises(RuntimeError, match="closed"):
            await last(llm.generate("hello"))

    asyncio.run(main())
    assert engine_threads() <= before


def test_an_error_of_a_row_is_raised_where_its_reply_broke_off(third_party: Installer, tmp_path: Path) -> None:
    options = script_options(third_party, tmp_path)

    async def main() -> None:
        async with AsyncLLM(**options) as llm:
            texts = []

            async def read() -> None:
                async for delta in llm.stream("oh! no"):
                    texts.append(delta.text)

            with pytest.raises(RowFault):
                await read()
            assert "".join(texts) == "oh"
            with pytest.raises(RowFault):
                await last(llm.generate("oh! no"))
            assert (await last(llm.generate("fine"))).outputs[0].text == "fine"

    asyncio.run(main())


def test_two_loops_one_after_the_other(model: Path, alone: list[RequestOutput]) -> None:
    """A loop that ended with requests under way, some of them without a place, holds up nothing."""
    llm = AsyncLLM(model, backend=BACKEND, max_num_seqs=1)

    async def leave() -> None:
        tasks = [asyncio.create_task(last(llm.generate("hello", ENDLESS))) for _ in range(WAITING + 3)]
        while len(llm._client.places._waiting) < 2:
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)

    asyncio.run(leave())
    assert ids(asyncio.run(last(llm.generate(PROMPTS[0], GREEDY)))) == ids(alone[0])
    asyncio.run(llm.close())


def test_a_loop_that_was_closed_keeps_no_request(model: Path, alone: list[RequestOutput]) -> None:
    """Closed with generators begun: nothing of asyncio ends them, and their ids are free all the same."""
    llm = AsyncLLM(model, backend=BACKEND)
    loop = asyncio.new_event_loop()

    async def begun(name: str) -> AsyncIterator[RequestOutput]:
        outputs = llm.generate("hello", ENDLESS, request_id=name)
        await anext(outputs)
        return outputs

    left = [loop.run_until_complete(begun(name)) for name in ("a", "b")]
    loop.close()
    assert not asyncio.run(llm.abort("a"))
    assert ids(asyncio.run(last(llm.generate(PROMPTS[0], GREEDY, request_id="b")))) == ids(alone[0])
    assert asyncio.run(idle(llm))
    del left
    asyncio.run(llm.close())
