"""What a client hears of its request, in this order for each choice: started, progress, deltas, one end (spec C16)."""

from __future__ import annotations

import attrs

from mlxcel.core.plan import TokenLogprobs
from mlxcel.core.result import RequestResult


@attrs.frozen
class Started:
    """The choice left the queue. `cached_tokens` of its prompt came from the prompt cache."""

    choice: int
    cached_tokens: int = 0


@attrs.frozen
class Progressed:
    """`processed` tokens of the choice's prompt are in its KV, those from the cache included: behind each piece, for
    requests that ask for it. A row that starts over counts again."""

    choice: int
    processed: int


@attrs.frozen(slots=False)  # made for each token: without slots that takes two thirds of the time
class Delta:
    """What came since the last one: text of the reply, reasoning that was split off it, ids, their log-probabilities.

    Tokens whose text is held back come with no text; text that a later token let go of comes with that token.
    """

    choice: int
    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@attrs.frozen
class Ended:
    """The choice ended, in whatever way; `result` says how. Nothing of it comes after this."""

    choice: int
    result: RequestResult


Event = Started | Progressed | Delta | Ended
