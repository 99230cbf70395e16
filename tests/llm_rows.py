"""Short words for tests of the Python API."""

from __future__ import annotations

import threading

import numpy as np

from mlxcel import RequestOutput, SamplingParams

BACKEND = "reference-numpy"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]


def ids(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


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
