"""What a client meets on JAX: everything is compiled before the first request, and all ways in say the same."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jax import monitoring
from llm_rows import GREEDY, ids
from test_random_requests import SHAPES, STOPS
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM, AsyncLLM, SamplingParams
from mlxcel_jax_cuda.compilations import compilations

OPTIONS = {"backend": "jax-cuda", "device": "cpu", "max_model_len": 128}
MORE = (
    {"logit_bias": [[5, 3.5], [6, False]], "temperature": 0.7},
    {"min_tokens": 3, "stop_token_ids": [3], "allowed_token_ids": [*range(300)]},
    {"temperature": 1.0, "dynatemp_range": 0.5, "typical_p": 0.9, "top_n_sigma": 2.0, "top_k": 30},
    {"temperature": 0.9, "logprobs": 20, "logprobs_mode": "processed", "window_frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.2, "repeat_last_n": -1, "logprobs": 5},
    {"temperature": 0, "prompt_logprobs": 3},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_num_seqs=8, **OPTIONS) as made:
        yield made


def test_h_q3_nothing_is_compiled_for_200_random_requests(llm: LLM) -> None:
    """H-Q3, spec S44: any number of rows, any length, any set of stages, also of rows that go on from the cache or
    have their prompt scored."""
    rng = np.random.default_rng(1)
    shapes = (*SHAPES, *MORE)
    prompts, params = [], []
    for n in range(200):
        prompts.append(rng.integers(0, 320, int(rng.choice([1, 3, 20, 63, 64, 65, 100]))).tolist())
        shape = shapes[int(rng.integers(len(shapes)))]
        stop = STOPS[int(rng.integers(len(STOPS)))]
        params.append(SamplingParams(**{"max_tokens": int(rng.integers(3, 14)), "seed": n, "stop": stop, **shape}))
    heard: list[str] = []
    monitoring.register_event_duration_secs_listener(lambda event, seconds, **details: heard.append(event))
    before = compilations().count
    outputs = llm.generate(prompts + prompts[:20], params + params[:20])
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}
    assert compilations().count == before
    assert [event for event in heard if "compile" in event] == []


def test_the_command_says_what_the_library_says(model: Path, llm: LLM) -> None:
    """In a process of its own, with JAX's answer for --device cpu."""
    command = ["generate", model, "--raw", "-p", "in the other", "-n", GREEDY.max_tokens, "--temp", 0, "--json", "-q"]
    command += ["--backend", "jax-cuda", "--device", "cpu", "--ctx-size", 128, "--generation-config", "none"]
    ran = subprocess.run(
        [sys.executable, "-m", "mlxcel", *map(str, command)],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert tuple(json.loads(ran.stdout)["token_ids"]) == ids(llm.generate("in the other", GREEDY)[0])


@pytest.mark.slow
def test_so_does_the_library_for_coroutines(model: Path, llm: LLM) -> None:
    prompts = ["in the other", "a", "on the" * 9]

    async def last(llm: AsyncLLM, prompt: str) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        async for output in llm.generate(prompt, GREEDY):
            found = ids(output)
        return found

    async def all_of_them() -> list[tuple[int, ...]]:
        async with AsyncLLM(model, max_num_seqs=8, **OPTIONS) as made:
            return await asyncio.gather(*(last(made, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == [ids(output) for output in llm.generate(prompts, GREEDY)]
