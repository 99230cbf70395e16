"""Short words for tests of the Python API."""

from __future__ import annotations

import threading

import numpy as np

from mlxcel import LLM, RequestOutput, SamplingParams

BACKEND = "reference-numpy"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]


def ids(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def idle(llm: LLM) -> bool:
    """Whether no row and no page is taken: asked between two ticks, until those that were cancelled have left."""
    for _ in range(1000):
        stats = llm.stats()
        kv = stats["kv"]
        if (stats["scheduler"]["rows_busy"], stats["scheduler"]["num_requests_waiting"], kv["owned"]) == (0, 0, 0):
            return kv["free"] + kv["cached"] == kv["total"]
    return False


def mixed(count: int) -> list[object]:
    """Prompts of all kinds and of 1 to 40 ids."""
    kinds = (
        lambda n: "the " * (1 + n % 20),
        lambda n: [5 + (n * k) % 290 for k in range(1 + n % 40)],
        lambda n: {"prompt": f"in the {n}"},
        lambda n: {"prompt_token_ids": (7, 8, 9 + n)},
        lambda n: np.arange(10, 14 + n % 8),
    )
    return [kinds[n % len(kinds)](n) for n in range(count)]


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("mlxcel")}
