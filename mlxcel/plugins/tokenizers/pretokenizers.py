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
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD_OF_CASE: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{end}}"
TEKKEN: Final = WORD_OF_CASE.replace("{end}", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O: Final = (
    WORD_OF_CASE.replace("{end}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


LLAMA_BPE: Final = PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True)
SMOLLM: Final = PreTokenizer((r"\p{N}", GPT2))
PRE_TOKENIZERS: Final = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "llama-bpe": LLAMA_BPE,
    "llama3": LLAMA_BPE,
    "llama-v3": LLAMA_BPE,
    "lfm2": LLAMA_BPE,
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "smollm": SMOLLM,
    "refact": SMOLLM,
    "starcoder": SMOLLM,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
}
