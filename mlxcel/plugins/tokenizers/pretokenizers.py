"""How a text is cut into words before byte pairs are merged, by the names GGUF files give to it.

The patterns are those of the models' own tokenizer.json; llama.cpp's `llm_tokenizer_bpe` spells the same ones for an
engine without case folding. A digit rule comes first where llama.cpp lists it first: patterns are applied in order,
each to the parts that the one before left.
"""

from __future__ import annotations

from typing import Final

import attrs
from tokenizers import Regex, normalizers, pre_tokenizers

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2: Final = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@attrs.frozen
class PreTokenizer:
    """Patterns in order; whether a word that is a token is taken whole; whether a BOS is the default; Unicode NFC."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def words(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, to_bytes])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


PRE_TOKENIZERS: Final = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "llama-bpe": PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
}
