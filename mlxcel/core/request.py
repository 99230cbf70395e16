"""The spec of one sequence."""

from __future__ import annotations

import attrs
import numpy as np

from mlxcel.core.params import SamplingParams
from mlxcel.core.reasoning import ReasoningSplit


@attrs.frozen(eq=False)
class SequenceSpec:
    """One sequence, complete: nothing in it is left to a default.

    prompt_ids: int32 [P]. `params` has its seed drawn and comes from `bind_params` where it holds texts to be encoded.
    `eos_ids` is the set E of docs/spec/engine.md 5.2. `reasoning` is how the text is split; None: all of it is content.
    With `echo` the prompt stands in front of the reply: its text, and with `logprobs` its tokens.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    choice: int = 0
    reasoning: ReasoningSplit | None = None
    echo: bool = False

    @property
    def prompt_scores(self) -> int | None:
        """How many best ids are wanted at each position of the prompt, -1 for all, None where it is not scored: for
        `prompt_logprobs`, and for `logprobs` with `echo`."""
        asked = [self.params.prompt_logprobs, self.params.logprobs if self.echo else None]
        wanted = [top for top in asked if top is not None]
        return None if not wanted else -1 if -1 in wanted else max(wanted)
