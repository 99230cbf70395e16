"""Spellings by which chat models end a turn, for vocabularies whose files do not say it by role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

END_OF_TURN: Final = (
    *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"),
    *("<end_of_utterance>", "<|endoftext|>", "<EOT>"),
)
END_OF_TEXT: Final = ("<|end_of_text|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>")
END_OF_MESSAGE: Final = ("<|eom_id|>",)


def end_roles(special: Mapping[str, int], roles: Mapping[str, int]) -> tuple[dict[str, int], frozenset[int]]:
    """The roles with "eot" and "eom" added by spelling where they lack, and all ids that end a turn.

    `special` maps the spellings of control tokens to ids: an end that is spelled in ordinary text is no end.
    """
    completed = dict(roles)
    for role, spellings in (("eot", END_OF_TURN), ("eom", END_OF_MESSAGE)):
        spelled = [special[spelling] for spelling in spellings if spelling in special]
        if role not in completed and spelled:
            completed[role] = spelled[0]
    ends = {special[spelling] for spelling in (*END_OF_TURN, *END_OF_TEXT, *END_OF_MESSAGE) if spelling in special}
    return completed, frozenset(ends | {completed[role] for role in ("eos", "eot", "eom") if role in completed})
