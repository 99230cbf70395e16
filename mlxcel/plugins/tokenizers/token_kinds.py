"""What a token of a vocabulary is, by the numbers that SentencePiece models and GGUF files share.

Source: sentencepiece's `sentencepiece_model.proto`, `ModelProto.SentencePiece.Type`.
"""

from __future__ import annotations

from typing import Final

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3  # never produced from text but by its spelling, when special spellings are parsed
USER_DEFINED: Final = 4  # found in a text before anything else
UNUSED: Final = 5  # a row that pads the vocabulary
BYTE: Final = 6  # "<0x0A>"
KINDS: Final = range(NORMAL, BYTE + 1)
