"""Short words for tests of the scheduler: requests over a script, without threads, on the manual clock."""

import attrs
from engine_rows import TOKENIZER, spec

from mlxcel.choices import choices
from mlxcel.core.events import Delta, Ended, Started
from mlxcel.core.request import Request
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.scripted import scripted_engine

STORES = ("dense", "paged")


def marked(row):
    """A script that says whose it is: the request's name and the choice over and over, of one letter a token."""
    return list((f"{row.request_id}{row.choice or ''}-" * 200).encode())


@attrs.define
class Bench:
    """A scheduler and what is around it."""

    it: object
    scheduler: Scheduler
    ended: list

    @property
    def clock(self):
        return self.it.clock

    def ask(self, name, prompt=b"abc", *, lane=1, timeout=0.0, before="", cache_prompt=True, **params):
        row = spec(name, prompt, **params)
        return self.scheduler.submit(
            Request(choices(row), lane=lane, timeout=timeout, before=before, cache_prompt=cache_prompt)
        )

    def run(self, ticks=10_000):
        """Tick until there is nothing to do. A scheduler that goes on for ever fails."""
        for _ in range(ticks):
            if not self.scheduler.tick():
                return
        raise AssertionError(f"still busy after {ticks} ticks")

    def all_free(self):
        stats = self.it.kv.stats()
        return (stats.owned, stats.free + stats.cached) == (0, stats.total)


class _Ends:
    def __init__(self, ended):
        self._ended = ended

    def step_finished(self, report):
        pass

    def request_finished(self, result):
        self._ended.append(result)


def bench(
    scripts=marked,
    *,
    chunk=64,
    busy=16,
    store="dense",
    pages=None,
    observers=(),
    cache=None,
    planned=lambda planner: planner,
    options=None,
    **engine,
):
    """`planned` may wrap the planners, `options` are SchedulerSettings.resolve's, `engine` the rest of
    `scripted_engine`."""
    ended = []
    if store == "paged":
        engine |= {"kv_store": PagedKV, "pages": pages}
    it = scripted_engine(scripts, tokenizer=TOKENIZER, observers=observers, **engine)
    level, caps = it.engine.level, it.engine.caps
    settings = SchedulerSettings.resolve(caps, level, **{"chunk": chunk, "chunk_busy": busy, **(options or {})})
    planners = [ChunkedPlanner(chunk=size, level=level, caps=caps) for size in (chunk, settings.chunk_busy) if size]
    idle, *busy = map(planned, planners)
    scheduler = Scheduler(
        it.engine,
        planner=idle,
        busy_planner=busy[0] if busy else None,
        settings=settings,
        observers=type(it.observers)([_Ends(ended)]),
        clock=it.clock,
        cache=None if cache is None else cache(it),
    )
    return Bench(it, scheduler, ended)


@attrs.define
class Heard:
    """What a client heard of one choice."""

    kinds: list = attrs.field(factory=list)
    deltas: list = attrs.field(factory=list)
    result: object = None

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self):
        return tuple(token for delta in self.deltas for token in delta.token_ids)


def drained(reply):
    """The events that are there."""
    return list(iter(lambda: reply.get(0), None))


def seen(reply):
    """What a client heard of a reply that ended, by choice. Checks the order of the events, and that the result says
    what was streamed."""
    heard = {}
    for event in reply:
        one = heard.setdefault(event.choice, Heard())
        assert Ended not in one.kinds, "nothing comes behind an end"
        assert type(event) is not Started or not one.kinds, "started comes first, and once"
        one.kinds.append(type(event))
        if type(event) is Delta:
            one.deltas.append(event)
        if type(event) is Ended:
            one.result = event.result
    for one in heard.values():
        assert one.kinds[-1] is Ended
        assert (one.text, one.ids) == (one.result.text, one.result.token_ids)
    return heard


def alone(name, prompt=b"abc", **params):
    """(text, ids, cause) of a request that nothing disturbs."""
    it = bench()
    reply = it.ask(name, prompt, **params)
    it.run()
    one = seen(reply)[0]
    return one.text, one.ids, one.result.cause
