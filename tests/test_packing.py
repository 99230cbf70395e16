"""A step in arrays: always what packing from nothing makes of its rows (docs/spec/engine.md 2, E5)."""

import random

import numpy as np
import pytest
from engine_rows import TOKENIZER, decode, opened, scripted
from scheduler_rows import STORES, bench, drained

from mlxcel.core import engine as engine_module
from mlxcel.core.packing import pack_behind, pack_step
from mlxcel.core.plan import CARRY, Piece, StepPlan
from mlxcel.errors import BatchShapeError, UnknownSequence
from mlxcel.plugins.kv.kept_pages import CacheLimits
from mlxcel.plugins.kv.prefix_cache import PrefixCache
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.scripted import SCRIPTED_KV

NO_ARRAYS = ("sampling", "scores", "__weakref__")
"""Of a StepPlan."""


def same_arrays(found, expected):
    """Names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape), name
        assert array.tobytes() == expected[name].tobytes(), name


class Untouched:
    """Arrays that were handed out: a backend may have them in flight, so nobody writes to them any more."""

    def __init__(self):
        self._kept = []

    def keep(self, arrays):
        self._kept += [(name, array, array.copy()) for name, array in arrays.items()]

    def check(self):
        for name, array, copy in self._kept:
            assert array.tobytes() == copy.tobytes(), name


def from_nothing(rows, parts, kv):
    """The arrays of StepPlan, row by row, as it describes them: (arrays but the sampler's, which rows draw)."""
    tokens, positions, lengths, drawn = [], [], [], []
    for row, part in zip(rows, parts, strict=True):
        at, known = row.stored + row.fed, len(row.spec.prompt_ids) + len(row.output)
        if isinstance(part, Piece):
            ids = list(part.plan.token_ids(part.index))
            drawn.append(part.plan.draw and part.index == len(part.plan.pieces) - 1)
        else:
            ids = [int(row.tokens(at, at + 1)[0]) if at < known else CARRY]
            drawn.append(at == known - 1 + row.drawing)
        tokens += ids
        positions += range(at, at + len(ids))
        lengths.append(len(ids))
    starts = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    tables = [kv.page_table(row.id).tolist() for row in rows]
    width = max(map(len, tables))
    copies = [kv.page_copy(row.id) for row in rows]
    return {
        "token_ids": np.array(tokens, np.int32),
        "positions": np.array(positions, np.int32),
        "query_start": np.array(starts, np.int32),
        "seq_lens": np.array([row.stored + row.fed + n for row, n in zip(rows, lengths, strict=True)], np.int32),
        "page_tables": np.array([table + [-1] * (width - len(table)) for table in tables], np.int32),
        "slots": np.array([row.slot for row in rows], np.int32),
        "state_copies": np.array([(row.steps + row.ahead) % 2 for row in rows], np.int32),
        "sequence_ids": np.array([row.id for row in rows], np.int64),
        "logits_rows": np.array([starts[place + 1] - 1 for place, draw in enumerate(drawn) if draw], np.int32),
        "draw_rows": np.array([place for place, draw in enumerate(drawn) if draw], np.int32),
        "page_copies": np.array([copy for copy in copies if copy], np.int32).reshape(-1, 3),
        "pieces": np.array([isinstance(part, Piece) for part in parts]),
    }, drawn


@pytest.fixture
def steps(monkeypatch):
    """Compares each step that is packed, those of a run too, with packing from nothing; [(pieces, decodes, ahead,
    copies, whether it is one of a run behind another)]."""
    happened, handed_out, stores = [], Untouched(), []

    def packed(rows, parts, lengths, drawing, copies, *, kv, sampler, **options):
        stores[:] = [kv]
        plan = pack_step(rows, parts, lengths, drawing, copies, kv=kv, sampler=sampler, **options)
        return compared(plan, rows, parts, False, **options)

    def packed_behind(first, rows, steps, *, sampler, **options):
        plans = pack_behind(first, rows, steps, sampler=sampler, **options)
        assert len(plans) == steps - 1
        for behind, plan in enumerate(plans, 1):
            changed = [(row, name, getattr(row, name)) for row in rows for name in ("fed", "drawing", "ahead")]
            for row, name, value in changed:
                setattr(row, name, value + behind)
            compared(plan, rows, decode(*(row.id for row in rows)), True, **options)
            for row, name, value in changed:
                setattr(row, name, value)
        return plans

    def compared(plan, rows, parts, behind, **options):
        expected, drawn = from_nothing(rows, parts, *stores)
        found = {name: getattr(plan, name) for name in StepPlan.__slots__ if name not in NO_ARRAYS}
        same_arrays(found, expected)
        assert not plan.scores
        drawing_rows = [row for row, draw in zip(rows, drawn, strict=True) if draw]
        ends = [int(expected["seq_lens"][place]) for place, draw in enumerate(drawn) if draw]
        if drawing_rows:
            own = ChainSampler(vocab=TOKENIZER.size, tokenizer=TOKENIZER).pack(
                [row.sampler_state for row in drawing_rows], ends, [row.drawing > 0 for row in drawing_rows], **options
            )
            assert (plan.sampling.stages, plan.sampling.top_logprobs) == (own.stages, own.top_logprobs)
            same_arrays(plan.sampling.params, own.params)
        handed_out.keep({**found, **plan.sampling.params})
        pieces = int(expected["pieces"].sum())
        ahead = any(row.drawing for row in rows)
        happened.append((pieces, len(parts) - pieces, ahead, len(expected["page_copies"]), behind))
        return plan

    monkeypatch.setattr(engine_module, "pack_step", packed)
    monkeypatch.setattr(engine_module, "pack_behind", packed_behind)
    yield happened
    handed_out.check()


def cached(it):
    return PrefixCache(
        kv=it.kv,
        kv_spec=SCRIPTED_KV,
        key=it.engine.kv_key,
        level="R2",
        chunk=5,
        page_bytes=16,
        limits=CacheLimits(min_prefix=1),
        clock=it.clock,
    )


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("seed", "together"), [(0, 1), (1, 3), (2, 3)])
def test_every_step_of_random_requests_is_what_packing_from_nothing_gives(steps, store, seed, together):
    """Spec E5, C51, C54: whatever came, went, was cut into pieces, ran ahead, shared pages or ended in between."""
    rng = random.Random(seed)
    cache = cached if store == "paged" else None
    it = bench(store=store, slots=5, context=64, chunk=5, busy=3, page_size=4, cache=cache, decode_run=together)
    replies = []
    for turn_number in range(60 * together):
        if rng.random() < 0.3 / together:
            prompt = b"abcdabceabcdab"[: rng.randint(1, 14)]
            given = rng.choice([{}, {"temperature": 0.8, "min_p": 0.1}, {"repetition_penalty": 1.1}, {"logprobs": 2}])
            name = f"r{turn_number}"
            replies.append(it.ask(name, prompt, max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 2]), **given))
        if replies and rng.random() < 0.05:
            rng.choice(replies).cancel()
        it.scheduler.tick()
    it.run()
    assert all(drained(reply) for reply in replies)
    assert {pieces > 0 and decodes > 0 for pieces, decodes, *_ in steps} == {True, False}
    assert any(ahead for _, _, ahead, _, _ in steps)
    assert any(copies for _, _, _, copies, _ in steps) == (store == "paged")
    assert any(behind for *_, behind in steps) == (together > 1)


def begun(engine, name, **params):
    row, plan = opened(engine, name, **params)
    engine.prefill(row, plan)
    return row


def test_a_reservation_does_not_outlive_its_rows():
    """Spec E3: a row that ended or went behind `reserve` takes no step."""
    engine = scripted({name: [*b"hello", EOS] for name in "ab"}).engine
    a, b = begun(engine, "a"), begun(engine, "b")
    engine.reserve(decode(a, b))
    engine.cancel(a)
    with pytest.raises(BatchShapeError, match="takes no step"):
        engine.submit(decode(a, b))
    engine.reserve(decode(b))
    engine.close(b)
    with pytest.raises(UnknownSequence):
        engine.submit(decode(b))


def test_a_reservation_is_looked_at_again_when_a_step_was_read_behind_it():
    """Spec E3: the token that was read in between ends the row."""
    engine = scripted({"a": [*b"h", EOS]}).engine
    row = begun(engine, "a")
    engine.reserve(decode(row))
    first = engine.submit(decode(row))
    engine.reserve(decode(row))
    assert engine.collect(first)[0].cause == "eos"
    with pytest.raises(BatchShapeError, match="takes no step"):
        engine.submit(decode(row))
