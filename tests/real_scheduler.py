"""The scheduler over a real model, without threads, on the manual clock: what a request becomes, by bits."""

import attrs
import numpy as np
from cache_rows import VOCAB, caching
from scheduler_rows import seen

from mlxcel.choices import choices
from mlxcel.core.observe import Observers
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import ByteTokenizer


@attrs.frozen
class Said:
    """What a client heard of one choice. How many tokens were cached is no part of what two of them must agree in."""

    ids: tuple
    text: str
    cause: str
    detail: object
    logprobs: tuple
    cached: int = attrs.field(eq=False)


@attrs.frozen
class Served:
    """A scheduler, and what is under it."""

    it: object  # cache_rows.Caching
    scheduler: Scheduler
    ended: list

    def ask(self, ids, name="row", *, lane=1, cache_prompt=True, salt=None, isolation=None, **params):
        """A reply on its way. Greedy where the parameters do not say otherwise."""
        row = SequenceSpec(
            name,
            np.asarray(ids, np.int32),
            SamplingParams(**{"temperature": 0, "seed": 0, **params}),
            cache_salt=salt,
            isolation=isolation,
        )
        return self.scheduler.submit(Request(choices(row), lane=lane, cache_prompt=cache_prompt))

    def tick(self):
        """One turn; the pool adds up behind each."""
        worked = self.scheduler.tick()
        stats = self.it.kv.stats()
        assert stats.free + stats.owned + stats.cached == stats.total
        return worked

    def run(self, ticks=100_000):
        for _ in range(ticks):
            if not self.tick():
                return
        raise AssertionError(f"still busy after {ticks} ticks")

    def answer(self, ids, **asked):
        """One request from beginning to end, alone unless others run already."""
        reply = self.ask(ids, **asked)
        self.run()
        return said(reply)[0]

    def all_free(self):
        """Whether only the prompt cache holds pages, and lets go of all of them."""
        if isinstance(self.it.kv, PagedKV):
            self.it.kv.check()
        stats = self.it.kv.stats()
        assert (stats.owned, stats.free + stats.cached) == (0, stats.total)
        self.it.cache.reset()
        stats = self.it.kv.stats()
        return (stats.free, stats.cached, self.it.engine.open_sequences) == (stats.total, 0, ())


class _Ends:
    def __init__(self, ended):
        self._ended = ended

    def step_finished(self, report):
        pass

    def request_finished(self, result):
        self._ended.append(result)


def served(*, cache=True, chunk=64, busy=16, options=None, **engine):
    """`engine` are the keywords of `cache_rows.caching`, `options` those of SchedulerSettings.resolve."""
    it = caching(**{"chunk": chunk, "context": 256, "tokenizer": ByteTokenizer(), **engine})
    caps, level = it.engine.caps, it.engine.level
    settings = SchedulerSettings.resolve(
        caps, level, chunk=chunk, chunk_busy=busy, **{"max_queue_depth": 10_000, **(options or {})}
    )
    ended = []
    scheduler = Scheduler(
        it.engine,
        planner=ChunkedPlanner(chunk=chunk, level=level, caps=caps),
        busy_planner=ChunkedPlanner(chunk=settings.chunk_busy or chunk, level=level, caps=caps),
        settings=settings,
        cache=it.cache if cache else None,
        observers=Observers((_Ends(ended),)),
        clock=it.clock,
    )
    return Served(it, scheduler, ended)


def said(reply):
    """What was heard of each choice of a reply that ended, by its index."""
    found = {}
    for choice, heard in sorted(seen(reply).items()):
        result = heard.result
        assert result.error is None or result.cause == "rejected", result.error
        found[choice] = Said(heard.ids, heard.text, result.cause, result.detail, result.logprobs, result.cached_tokens)
    return found


def random_ids(length, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
