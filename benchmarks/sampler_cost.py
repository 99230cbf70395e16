"""What the sampler adds to a step on NumPy: the server's default chain, and DRY and penalties on top of it.

    python benchmarks/sampler_cost.py CHECKPOINT.gguf [--steps 60] [--rounds 5] [--json FILE]

Three rows of one engine take turns, a step each, so that a busy machine slows all of them: greedy, with the server's
default chain, with that and DRY and both pairs of penalties over a prompt that repeats itself. Every step is one row.
Time on the wall decides where the machine is quiet; the time of the calling thread leaves out what others took, and
tells something on a busy one when OPENBLAS_NUM_THREADS=1 keeps threads from waiting for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from provenance import provenance

from mlxcel.core.engine import Engine
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.tokenizers.gguf_tokenizer import load
from mlxcel.text.detokeniser import Detokeniser
from mlxcel_reference_numpy.backend import NumpyBackend

PROMPT: Final = 256
CONTEXT: Final = 1024
GOAL: Final = 0.10  # of a step, for the chain and again for what is on top of it

ALL: Final = "chain, DRY, penalties"
CHAIN: Final[dict[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
PENALTIES: Final[dict[str, Any]] = {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.2,
    "window_frequency_penalty": 0.1,
    "window_presence_penalty": 0.1,
    "dry_multiplier": 0.8,
    "dry_penalty_last_n": -1,
}
ROWS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "chain": CHAIN,
    ALL: CHAIN | PENALTIES,
}
CLOCKS: Final[dict[str, Callable[[], float]]] = {"wall": time.perf_counter, "thread": time.thread_time}


class OpenEngine:
    """The model on NumPy with a slot for each kind of row."""

    def __init__(self, path: Path) -> None:
        checkpoint, family = GgufCheckpoint(path), Llama()
        config = family.parse_config(checkpoint)
        tokenizer = load(checkpoint)
        self.backend, self.vocab = NumpyBackend(), config.vocab_size
        self.backend.load(family, config, checkpoint, NoProgress())
        kv_spec = family.kv_spec(config)
        self.engine = Engine(
            backend=self.backend,
            kv_spec=kv_spec,
            kv=DenseKV(kv_spec=kv_spec, slots=len(ROWS), context=CONTEXT, page_size=16),
            sampler=ChainSampler(vocab=self.vocab, tokenizer=tokenizer),
            finish=StandardFinish(stream=lambda spec: Detokeniser(tokenizer), steps={}),
            settings=EngineSettings(self.vocab, CONTEXT, len(ROWS)),
        )

        # The prompt repeats every 50 tokens.
        ids = (np.arange(PROMPT) % 50 * 7919 % self.vocab).astype(np.int32)
        plan = ChunkedPlanner(chunk=2048, level="R2", caps=self.backend.caps).build(ids)
        self.rows = {}
        for name, fields in ROWS.items():
            spec = SequenceSpec(name, ids, SamplingParams(seed=1, ignore_eos=True, **fields))
            self.rows[name] = self.engine.open(spec)
            self.engine.prefill(self.rows[name], plan)

    def times(self, steps: int) -> dict[str, dict[str, float]]:
        """By clock and kind of row: median seconds of the next steps."""
        found: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in ROWS} for clock in CLOCKS}
        names = list(ROWS)
        for turn in range(steps):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = [clock() for clock in CLOCKS.values()]
                (outcome,) = self.engine.step([self.rows[name]])
                for (clock, read), start in zip(CLOCKS.items(), began, strict=True):
                    found[clock][name].append(read() - start)
                if outcome.error is not None:
                    raise outcome.error
        return {
            clock: {name: statistics.median(values) for name, values in rows.items()} for clock, rows in found.items()
        }


def measure(path: Path, steps: int, rounds: int) -> dict[str, Any]:
    opened = OpenEngine(path)
    opened.times(4)
    runs = [opened.times(steps) for _ in range(rounds)]
    record = {
        "model": path.name,
        **provenance(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
        "vocabulary": opened.vocab,
        "rounds": rounds,
        "steps": steps,
    }
    for clock in CLOCKS:
        taken = [run[clock] for run in runs]
        record[clock] = {
            "step_ms": {name: [1e3 * run[name] for run in taken] for name in ROWS},
            "chain adds": [run["chain"] / run["greedy"] - 1 for run in taken],
            "DRY and penalties add": [(run[ALL] - run["chain"]) / run["greedy"] for run in taken],
        }
    return record


def show(record: dict[str, Any]) -> None:
    print(f"{record['model']}  {record['machine']}  numpy {record['numpy']}  commit {record['commit']}")
    print(f"load {record['load_average'][0]:.1f} before, BLAS threads: {record['blas_threads']}")
    for clock in CLOCKS:
        for name, values in record[clock]["step_ms"].items():
            print(f"{clock:8} {name:24} {statistics.median(values):8.2f} ms a step")
        for key in ("chain adds", "DRY and penalties add"):
            middle, least, most = (pick(record[clock][key]) for pick in (statistics.median, min, max))
            met = "met" if middle <= GOAL else "MISSED"
            print(f"{clock:8} {key:24} {middle:8.1%}  ({least:.1%} … {most:.1%})  goal {GOAL:.0%}  {met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = measure(options.checkpoint, options.steps, options.rounds)
    show(record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
