"""The numbers of one request, and of all of them together (docs/spec/clients.md 8.2). Seconds, but where a name says
otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import attrs

from mlxcel.tools.load.dataset import Asked
from mlxcel.tools.load.measure import Sent
from mlxcel.tools.load.reply import Reply


@attrs.frozen
class Numbers:
    """Of a request that was completed. None: it has no such number. `source` is who counted its output tokens."""

    sent: float
    ended: float
    input_tokens: int
    output_tokens: int
    source: str
    times: Sequence[float]

    @classmethod
    def of(cls, asked: Asked, reply: Reply, counted: Callable[[str], int] | None) -> Numbers:
        """`counted` gives the tokens of a text, where there is a tokenizer."""
        given = reply.tokens("prompt_tokens")
        input_tokens = given if given is not None else asked.input_len or 0
        output, source = reply.tokens("completion_tokens"), "usage"
        if output is None and counted is not None:
            output, source = counted("".join(reply.text)), "tokenizer"
        if output is None:
            output, source = len(reply.times), "chunks"
        return cls(reply.sent, reply.ended, input_tokens, output, source, reply.times)

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    @property
    def e2el(self) -> float | None:
        return self.times[-1] - self.sent if self.times else None

    @property
    def tpot(self) -> float | None:
        """None for a reply that came in one chunk: nothing says how long its tokens took."""
        if len(self.times) < 2 or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    def within(self, bounds_ms: Mapping[str, float]) -> bool:
        """Whether it kept each bound. A number that it has not breaks none, but for those of a reply without text."""
        found = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        values = [(found[name], most) for name, most in bounds_ms.items()]
        return bool(self.times) and all(value is None or 1000 * value <= most for value, most in values)


METRICS: Final[Mapping[str, Callable[[Numbers], Iterable[float | None]]]] = {
    "ttft": lambda each: (each.ttft,),
    "tpot": lambda each: (each.tpot,),
    "itl": lambda each: each.itls,
    "e2el": lambda each: (each.e2el,),
}


def milliseconds(name: str, numbers: Iterable[Numbers]) -> list[float]:
    """All values of a metric."""
    return [1000 * value for each in numbers for value in METRICS[name](each) if value is not None]


def most_at_once(sent: Iterable[Sent]) -> int:
    """Requests under way at the same moment; one that ends where another begins is no neighbour of it."""
    edges = sorted(edge for each in sent for edge in ((each.reply.sent, 1), (each.reply.ended, -1)))
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def most_tokens_in_a_second(numbers: Iterable[Numbers], began: float) -> float:
    """Output tokens of the fullest second, counted from the start; a reply's are spread evenly over its chunks."""
    seconds: defaultdict[int, float] = defaultdict(float)
    for each in numbers:
        for time in each.times:
            seconds[int(time - began)] += each.output_tokens / len(each.times)
    return max(seconds.values(), default=0.0)
