"""Short words for tests of the engine."""

import numpy as np

from mlxcel.core.backend import BackendCaps
from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Decode, Piece
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import EOS, TURN_END, ByteTokenizer
from mlxcel.testing.scripted import scripted_engine

TOKENIZER = ByteTokenizer()
ENDS = frozenset({EOS, TURN_END})
CAPS = BackendCaps(
    level="R2", platform="cpu", device="x", dtype="float32", page_sizes=(16,), run_ahead=True, mixed_steps=True
)


def scripted(scripts, **options):
    return scripted_engine(scripts, tokenizer=TOKENIZER, **options)


def spec(name, prompt=b"abc", **params):
    return SequenceSpec(
        request_id=name,
        prompt_ids=np.frombuffer(bytes(prompt), np.uint8).astype(np.int32),
        params=SamplingParams(**{"temperature": 0, "seed": 0, **params}),
        eos_ids=ENDS,
    )


def plan_for(ids, chunk=2048, **options):
    return ChunkedPlanner(chunk=chunk, level="R2", caps=CAPS).build(np.array(list(ids), np.int32), **options)


def opened(engine, name, prompt=b"abc", chunk=2048, **params):
    """Open a row; its id and a plan for its prompt."""
    row = spec(name, prompt, **params)
    return engine.open(row), plan_for(row.prompt_ids, chunk)


def turn(engine, *parts):
    engine.reserve(parts)
    return engine.collect(engine.submit(parts))


def decode(*ids):
    return [Decode(i) for i in ids]


def pieces(sequence_id, plan):
    return [Piece(sequence_id, plan, index) for index in range(len(plan.pieces))]


def run_to_end(engine, sequence_id, plan):
    """Prefill and decode one row; (output ids, text, last outcome)."""
    outcome = engine.prefill(sequence_id, plan)
    text = outcome.text
    while outcome.cause is None and outcome.error is None:
        outcome = engine.step([sequence_id])[0]
        text += outcome.text
    return engine.view(sequence_id).output, text, outcome
