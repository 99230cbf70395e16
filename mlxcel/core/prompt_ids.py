"""The ids of a prompt against a model's bounds: what cannot run is refused, and cut only where a request asks."""

from __future__ import annotations

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.errors import ContextTooLong, EmptyPrompt, RequestError


def check_prompt(ids: np.ndarray, *, vocab: int, context: int) -> None:
    """`ids` [P] must be integers in [0, V), 1 <= P < N; V is `vocab`, N `context`. EmptyPrompt, RequestError,
    ContextTooLong."""
    if ids.ndim != 1:
        raise RequestError(f"the prompt has {ids.ndim} axes, a list of token ids is needed", field="prompt")
    if len(ids) == 0:
        raise EmptyPrompt("the prompt comes to no token", hint="give at least one token, or a tokenizer with a BOS")
    if not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(f"the prompt holds {ids.dtype} numbers, token ids are integers", field="prompt")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise RequestError(f"token id {bad} is not in the vocabulary of {vocab}", field="prompt")
    if len(ids) >= context:
        raise ContextTooLong(len(ids), context)


def truncate_prompt(spec: SequenceSpec, context: int) -> tuple[SequenceSpec, int]:
    """The spec with the newest ids of its prompt alone, as many as `truncate_prompt_tokens` keeps, and how many went.

    -1 keeps what fits: with max_tokens behind it, or one token where max_tokens is -1 or 0, no more than `context`
    positions, N; at least one id stays. Without the field nothing is ever cut.
    """
    asked, length = spec.params.truncate_prompt_tokens, len(spec.prompt_ids)
    if asked is None:
        return spec, 0
    kept = max(1, context - max(1, spec.params.max_tokens)) if asked == -1 else asked
    if length <= kept:
        return spec, 0
    return attrs.evolve(spec, prompt_ids=spec.prompt_ids[length - kept :]), length - kept
