"""A real engine over a checkpoint, with every drawn row's logits kept, for tests that compare bits."""

import attrs
import numpy as np
from tested_backends import chain_for, keeping_backend

from mlxcel.core.engine import Engine
from mlxcel.core.observe import Observers
from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Decode, Piece
from mlxcel.core.prefix import ModelIdentity
from mlxcel.core.request import SequenceSpec
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.text.detokeniser import Detokeniser


@attrs.frozen
class Real:
    """An engine and what a test wants to look at."""

    engine: Engine
    backend: object  # one that keeps logits, of tested_backends
    vocab: int

    def plan(self, ids, chunk=2048):
        return ChunkedPlanner(chunk=chunk, level="R2", caps=self.backend.caps).build(np.asarray(ids, np.int32))

    def open(self, ids, **params):
        chosen = SamplingParams(**{"temperature": 0, "seed": 0, **params})
        return self.engine.open(SequenceSpec("row", np.asarray(ids, np.int32), chosen))

    def alone(self, ids, steps, chunk=2048, **params):
        """Logits [steps + 1, V] of a lone row, and the ids it drew."""
        row = self.open(ids, **params)
        self.engine.prefill(row, self.plan(ids, chunk))
        for _ in range(steps):
            self.engine.step([row])
        return self.close(row)

    def close(self, row):
        output = self.engine.view(row).output
        self.engine.close(row)
        positions = sorted(position for kept, position in self.backend.kept if kept == row)
        return np.stack([self.backend.kept.pop((row, position)) for position in positions]), output

    def together(self, prompts, steps, chunks, turns):
        """Rows that join, advance and leave as `turns` says: for each turn the rows that take part, in order.

        Rows are opened when they are first named and closed when they have drawn `steps[i] + 1` tokens. Returns what
        `alone` returns for each.
        """
        rows, left, done = {}, {}, {}
        for turn in turns:
            parts = []
            for index in turn:
                if index in done:
                    continue
                if index not in rows:
                    rows[index] = self.open(prompts[index])
                    plan = self.plan(prompts[index], chunks[index])
                    left[index] = [Piece(rows[index], plan, piece) for piece in range(len(plan.pieces))]
                parts.append(left[index].pop(0) if left[index] else Decode(rows[index]))
            if parts:
                self.engine.reserve(parts)
                self.engine.collect(self.engine.submit(parts))
            for index in turn:
                if index not in done and len(self.engine.view(rows[index]).output) > steps[index]:
                    done[index] = self.close(rows[index])
        return done


def real_engine(
    checkpoint,
    family=None,
    *,
    slots=9,
    context=512,
    chunk=2048,
    tokenizer=None,
    observers=(),
    max_logprobs=20,
    kv_store=DenseKV,
    page_size=16,
    pages=None,
    backend=None,
    identity=None,
):
    """With a tokenizer, ids at or above its size are masked, and texts are its own."""
    family = family or Llama()
    config = family.parse_config(checkpoint)
    backend = backend or keeping_backend()
    backend.load(family, config, checkpoint, NoProgress())
    kv_spec = family.kv_spec(config)
    engine = Engine(
        backend=backend,
        kv_spec=kv_spec,
        kv=kv_store(kv_spec=kv_spec, slots=slots, context=context, page_size=page_size, pages=pages),
        sampler=chain_for(backend, vocab=config.vocab_size, tokenizer=tokenizer),
        finish=StandardFinish(stream=lambda spec: Detokeniser(tokenizer or ByteTokenizer()), steps={}),
        settings=EngineSettings(
            config.vocab_size, context, slots, chunk, max_logprobs=max_logprobs, identity=identity or ModelIdentity()
        ),
        observers=Observers(tuple(observers)),
    )
    return Real(engine, backend, config.vocab_size)


def assert_same_bits(first, second, words=""):
    """On failure: the first step and logit that differ, both values, and the gap of the two best there."""
    assert first.shape == second.shape, words
    if first.tobytes() != second.tobytes():
        step, place = np.argwhere(first.view(np.uint32) != second.view(np.uint32))[0]
        best = np.sort(first[step])[-2:]
        raise AssertionError(
            f"{words}: step {step}, logit {place}: {first[step, place]!r} and {second[step, place]!r}; "
            f"the two best are {best[1] - best[0]} apart"
        )
