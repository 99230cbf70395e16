"""How close decoding on NumPy is to its own floor: the summed matrix-vector time of the model's weight shapes.

    python benchmarks/cpu_decode.py CHECKPOINT.gguf [--steps 24] [--rounds 5] [--json FILE]

Both sides run in one process, in interleaved rounds, so that a busy machine slows both. The floor multiplies each
weight matrix that a decoded token reads by a vector, once, with nothing in between. Peak memory is that of a child
process which loads the model and decodes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

from mlxcel.core.engine import Engine
from mlxcel.core.family import WeightSchema
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
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.text.detokeniser import Detokeniser
from mlxcel_reference_numpy.backend import NumpyBackend

PROMPT = 64
CONTEXT = 1024
GOAL = 0.6  # share of the floor, docs/design.md 1
MEMORY_GOAL = 2.2  # times the resident float32 weights


def open_engine(path: Path) -> tuple[Engine, NumpyBackend, WeightSchema, int]:
    """The model on NumPy with room for one row; text plays no part, so any tokenizer serves."""
    checkpoint, family = GgufCheckpoint(path), Llama()
    config = family.parse_config(checkpoint)
    backend = NumpyBackend()
    backend.load(family, config, checkpoint, NoProgress())
    kv_spec = family.kv_spec(config)
    engine = Engine(
        backend=backend,
        kv_spec=kv_spec,
        kv=DenseKV(kv_spec=kv_spec, slots=1, context=CONTEXT, page_size=16),
        sampler=ChainSampler(vocab=config.vocab_size),
        finish=StandardFinish(stream=lambda spec: Detokeniser(ByteTokenizer()), steps={}),
        settings=EngineSettings(config.vocab_size, CONTEXT, 1),
    )
    return engine, backend, family.schema(config), config.vocab_size


def decode_times(engine: Engine, backend: NumpyBackend, vocab: int, steps: int) -> tuple[float, float]:
    """Seconds of a prefill of PROMPT tokens and of the median decode step behind it."""
    ids = (np.arange(PROMPT) * 7919 % vocab).astype(np.int32)
    row = engine.open(SequenceSpec("bench", ids, SamplingParams(temperature=0, seed=0)))
    plan = ChunkedPlanner(chunk=2048, level="R2", caps=backend.caps).build(ids)
    began = time.perf_counter()
    engine.prefill(row, plan)
    prefill = time.perf_counter() - began
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step([row])
        times.append(time.perf_counter() - began)
    engine.close(row)
    return prefill, statistics.median(times)


def floor_matrices(schema: WeightSchema) -> list[np.ndarray]:
    """One array for each fused group that a token reads, written to, so that it is really there."""
    found = []
    for group in dict.fromkeys(w.group or w.name for w in schema.weights if w.role == "linear"):
        members = schema.group(group)
        shape = (sum(w.shape[0] for w in members), members[0].shape[1])
        copies = schema.layers if members[0].per_layer else 1
        found += [np.full(shape, 0.01, np.float32) for _ in range(copies)]
    return found


def floor_time(matrices: list[np.ndarray], steps: int) -> float:
    """Median seconds of one pass of matrix-vector products over all of them."""
    vectors = {m.shape[1]: np.full(m.shape[1], 0.5, np.float32) for m in matrices}
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        for matrix in matrices:
            np.dot(matrix, vectors[matrix.shape[1]])
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_memory(path: Path) -> tuple[int, int]:
    """(peak resident bytes, bytes of float32 weights) of a child that loads the model and decodes."""
    child = subprocess.run(
        [sys.executable, __file__, str(path), "--memory"], check=True, capture_output=True, text=True
    )
    peak, weights = json.loads(child.stdout)
    return peak, weights


def measure(path: Path, steps: int, rounds: int) -> dict[str, Any]:
    peak, weights = peak_memory(path)
    engine, backend, schema, vocab = open_engine(path)
    matrices = floor_matrices(schema)
    read = sum(matrix.nbytes for matrix in matrices)
    decode_times(engine, backend, vocab, 4)
    floor_time(matrices, 2)
    prefills, decodes, floors = [], [], []
    for _ in range(rounds):
        prefill, decode = decode_times(engine, backend, vocab, steps)
        prefills.append(prefill)
        decodes.append(decode)
        floors.append(floor_time(matrices, steps))
    shares = [floor / decode for floor, decode in zip(floors, decodes, strict=True)]
    return {
        "model": path.name,
        **provenance(),
        "rounds": rounds,
        "steps": steps,
        "decode_ms": [1e3 * value for value in decodes],
        "floor_ms": [1e3 * value for value in floors],
        "share_of_floor": shares,
        "weight_bytes_a_token": read,
        "prefill_tokens_per_second": [PROMPT / value for value in prefills],
        "peak_bytes": peak,
        "resident_weight_bytes": weights,
    }


def show(record: dict[str, Any]) -> None:
    def middle(key: str) -> float:
        return float(statistics.median(record[key]))

    decode, floor, share = middle("decode_ms"), middle("floor_ms"), middle("share_of_floor")
    memory = record["peak_bytes"] / record["resident_weight_bytes"]
    rate = record["weight_bytes_a_token"] / decode / 1e6
    print(f"{record['model']}  {record['machine']}  numpy {record['numpy']}  commit {record['commit']}")
    print(f"         load {record['load_average'][0]:.1f} before, {record['rounds']} rounds of {record['steps']} steps")
    print(f"decode   {decode:7.2f} ms a token  {1e3 / decode:6.1f} tok/s  {rate:5.1f} GB/s of weights")
    print(f"floor    {floor:7.2f} ms (matrix-vector products alone)")
    spread = f"{min(record['share_of_floor']):.0%} … {max(record['share_of_floor']):.0%}"
    print(f"share    {share:7.0%}  ({spread})  goal {GOAL:.0%}  {'met' if share >= GOAL else 'MISSED'}")
    print(f"prefill  {middle('prefill_tokens_per_second'):7.1f} tok/s at {PROMPT} tokens")
    print(f"memory   {memory:7.2f} x the float32 weights at peak  goal {MEMORY_GOAL}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        engine, backend, _, vocab = open_engine(options.checkpoint)
        decode_times(engine, backend, vocab, 8)
        unit = 1 if sys.platform == "darwin" else 1024
        print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, backend.weight_bytes]))
        return
    record = measure(options.checkpoint, options.steps, options.rounds)
    show(record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
