"""Batch invariance, and the same ids by every way in (hand cases G)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from cli_runs import Cli
from llm_rows import BACKEND, ids
from real_scheduler import random_ids, said, served
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.on_jax(most=0)

LENGTHS = (1, 5, 16, 17, 40, 64, 65, 90)
BUDGETS = (1, 2, 3, 5, 8, 40, 40, 40)


def alone(prompt, **params):
    return served(cache=False, store="dense").answer(prompt, **params)


@pytest.mark.parametrize("store", ["dense", "paged"])
def test_h_g1_eight_prompts_one_by_one_and_together(backend, store):
    """Greedy ids and log-probabilities, which are as fine as the logits' bits."""
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    it = served(store=store, slots=8)
    replies = [it.ask(prompt, max_tokens=20, logprobs=3) for prompt in prompts]
    it.run()
    assert [said(reply)[0] for reply in replies] == [alone(prompt, max_tokens=20, logprobs=3) for prompt in prompts]


@pytest.mark.parametrize("store", ["dense", "paged"])
@pytest.mark.parametrize("slots", [3, 8])
def test_h_g5_a_freed_slot_never_touches_a_live_one(backend, store, slots):
    prompts = [random_ids(10 + n, seed=n) for n in range(len(BUDGETS))]
    it = served(store=store, slots=slots)
    asked = list(zip(prompts, BUDGETS, strict=True))
    replies = [it.ask(prompt, max_tokens=budget, logprobs=1) for prompt, budget in asked]
    it.run()
    assert [said(reply)[0] for reply in replies] == [
        alone(prompt, max_tokens=budget, logprobs=1) for prompt, budget in asked
    ]
    assert it.all_free()


@pytest.mark.parametrize("concurrency", range(1, 10))
def test_h_g7_odd_sizes_and_late_joiners(backend, concurrency):
    rng = np.random.default_rng(concurrency)
    it, replies = served(store="paged", slots=9), []
    for n in range(concurrency):
        prompt, budget = random_ids(int(rng.integers(1, 60)), seed=100 + n), int(rng.integers(1, 25))
        replies.append((prompt, budget, it.ask(prompt, max_tokens=budget, seed=n, temperature=0.9)))
        for _ in range(int(rng.integers(0, 6))):
            it.tick()
    it.run()
    for n, (prompt, budget, reply) in enumerate(replies):
        assert said(reply)[0] == alone(prompt, max_tokens=budget, seed=n, temperature=0.9)


@pytest.mark.parametrize("sampled", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
def test_h_g4_every_way_in_gives_the_same_ids(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    sampled: dict[str, float],
) -> None:
    """`generate`, `LLM.generate` alone and in a list, `LLM.stream`, `AsyncLLM`."""
    model = write_tiny_llama(tmp_path / "tiny")
    text, params = "in the other", SamplingParams(max_tokens=16, **sampled)
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    flags = [part for name, value in sampled.items() for part in (f"--{name}", value)]
    # What the file of the model says of sampling is the command's default and not the library's.
    neutral = ("--top-k", 0, "--top-p", 1, "--min-p", 0, "--backend", BACKEND, "--generation-config", "none")
    ran = Cli(monkeypatch, capfdbinary)(
        "generate", model, "--raw", "-p", text, "-n", 16, "--json", "-q", *neutral, *flags
    )
    assert ran.code == 0, ran.err
    expected = tuple(json.loads(ran.out)["token_ids"])
    assert len(expected) == 16

    with LLM(model, backend=BACKEND) as llm:
        assert ids(llm.generate(text, params)[0]) == expected
        crowd = llm.generate([text, "a", text, "on the" * 9, text], params)
        assert [ids(crowd[place]) for place in (0, 2, 4)] == [expected] * 3
        streamed = [token for delta in llm.stream(text, params) for token in delta.token_ids]
        assert tuple(streamed) == expected

    async def last() -> tuple[int, ...]:
        llm = AsyncLLM(model, backend=BACKEND)
        try:
            async for output in llm.generate(text, params):
                found = ids(output)
            return found
        finally:
            await llm.close()

    assert asyncio.run(last()) == expected
