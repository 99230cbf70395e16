"""The stages that change logits, in the order they run: 1 to 6 of spec 4.1."""

from __future__ import annotations

from collections.abc import Mapping

from mlxcel.core.param_records import MOST_PROCESSORS
from mlxcel.core.sampling import BatchedProcessor, HostMask, LogitsProcessor
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import PluginError
from mlxcel.plugins.sampling.bad_words import BadWords
from mlxcel.plugins.sampling.bias import LogitBias
from mlxcel.plugins.sampling.dry import Dry
from mlxcel.plugins.sampling.masks import Masks
from mlxcel.plugins.sampling.penalties import CountPenalty, Repetition
from mlxcel.plugins.sampling.processors import ProcessorStage
from mlxcel.plugins.sampling.stage import Stage
from mlxcel.plugins.sampling.token_masks import AllowedIds, IgnoreEnds, MinTokens, NeverDrawn

KINDS = ("bias", "processors", "masks")

LONGEST_HISTORY = 4096


def logit_stages(
    vocab: int, tokenizer: Tokenizer | None, processors: Mapping[str, LogitsProcessor]
) -> tuple[Stage, ...]:
    """All of them, in order; a step runs those that a row uses. `processors` are by registered name.

    PluginError for a processor that is of no kind there is.
    """
    for name, processor in processors.items():
        _check(name, processor)
    batched = {name: it for name, it in processors.items() if isinstance(it, BatchedProcessor)}
    masks = {name: it for name, it in processors.items() if isinstance(it, HostMask)}
    built_in = (NeverDrawn(vocab), AllowedIds(vocab), IgnoreEnds(vocab), MinTokens(vocab), BadWords(vocab, tokenizer))
    bias = LogitBias(vocab)
    return (
        ProcessorStage("bias", bias, vocab, nothing=bias.nothing),
        *_in_places("bias", batched, vocab),
        Repetition(vocab),
        Dry(vocab, tokenizer),
        CountPenalty(vocab, windowed=False),
        CountPenalty(vocab, windowed=True),
        *_in_places("processors", batched, vocab),
        *_in_places("masks", batched, vocab),
        Masks(vocab, built_in, masks),
    )


def _in_places(kind: str, processors: Mapping[str, BatchedProcessor], vocab: int) -> list[Stage]:
    """Each processor of a kind at each place of a request's list: the request's order is the order they run in."""
    own = {name: it for name, it in processors.items() if it.stage == kind}
    return [
        ProcessorStage(f"{kind}.{place}.{name}", it, vocab, foreign=name, place=place, kind=frozenset(own))
        for place in range(MOST_PROCESSORS if own else 0)
        for name, it in own.items()
    ]


def _check(name: str, processor: LogitsProcessor) -> None:
    applies, masks = hasattr(processor, "apply"), hasattr(processor, "mask")
    length = getattr(processor, "history", None)
    if processor.stage not in KINDS:
        fault = f"has the stage {processor.stage!r}, which is none of {', '.join(KINDS)}"
    elif applies == masks:
        fault = "must have one of `apply` and `mask`"
    elif masks and (processor.stage != "masks" or not isinstance(processor, HostMask)):
        fault = "has `mask`: then its stage is 'masks', and it has `closed`"
    elif applies and not (type(length) is int and 0 <= length <= LONGEST_HISTORY):
        fault = f"has a `history` of {length!r}, and it must be of 0 to {LONGEST_HISTORY} ids"
    else:
        return
    raise PluginError(f"the logits processor {name!r} {fault}", hint="docs/hooks.md says what a logits processor is")
