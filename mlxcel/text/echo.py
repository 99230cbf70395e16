"""Replies with their prompt in front: together they are one text, `decode(prompt ++ ids)` (spec T2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxcel.text.detokeniser import Detokeniser

if TYPE_CHECKING:
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.tokenizer import Tokenizer


def reply_stream(tokenizer: Tokenizer, spec: SequenceSpec) -> Detokeniser:
    """The detokeniser of a row's reply. With `spec.echo` it goes on where the prompt's text ends, so that a character
    or a space between the two is neither lost nor written twice."""
    stream, _ = _begun(tokenizer, spec)
    return stream


def echoed(tokenizer: Tokenizer, spec: SequenceSpec, *, whole: bool) -> str:
    """The prompt's text as it stands before the reply, "" without `spec.echo`. `whole` says that no reply follows that
    could finish the prompt's last character."""
    stream, text = _begun(tokenizer, spec)
    return text + stream.flush() if whole and spec.echo else text


def _begun(tokenizer: Tokenizer, spec: SequenceSpec) -> tuple[Detokeniser, str]:
    stream = Detokeniser(tokenizer, skip_special=spec.params.skip_special_tokens)
    if not spec.echo:
        return stream, ""
    return stream, "".join(stream.push(int(token)) for token in spec.prompt_ids)
