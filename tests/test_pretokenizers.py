"""How each pre-tokenizer that GGUF files name cuts a text into words (engine specification, T21)."""

from __future__ import annotations

import pytest
from tiny_checkpoint import byte_alphabet
from tokenizers import pre_tokenizers

from mlxcel.plugins.tokenizers.pretokenizers import PRE_TOKENIZERS

TEXTS = (
    "",
    "def f(x):\n    return {'a': x[0] ** 2}  # naïve\n\n\n\tif x != None: pass\r\n",
    "Él está aquí — «déjà vu», coöperate, e\u0301 decomposed",
    "日本語の文章です。中文也一样，한국어도. 🙂👩‍👩‍👧‍👦🇩🇪",
    "   leading,  double   triple \t tabs \n \n newlines   ",
    "1234567 3.14159 ½ ² ٣٤ 12:30",
    "\u00a0\u2003\u3000 exotic spaces\u200b\ufeff",
)

# How the patterns cut, worked out by hand from their definitions; "·" is a space, "¶" a newline.
CUT_TEXT = "it's 1234 IT'S   x=-1 (y)\n\n"
CUTS = {
    "gpt-2": "it|'s|·1234|·IT|'|S|··|·x|=-|1|·(|y|)|¶¶",
    "smollm": "it|'s|·|1|2|3|4|·IT|'|S|··|·x|=-|1|·(|y|)|¶¶",
    "llama-bpe": "it|'s|·|123|4|·IT|'S|··|·x|=-|1|·(|y|)¶¶",
    "qwen2": "it|'s|·|1|2|3|4|·IT|'S|··|·x|=-|1|·(|y|)¶¶",
    "default": "it|'|s|·|123|4|·IT|'|S|··|·x|=-|1|·|(|y|)|¶¶",
    "tekken": "it|'s|·|1|2|3|4|·IT|'S|··|·x|=-|1|·(|y|)¶¶",
    "gpt-4o": "it's|·|123|4|·IT'S|··|·x|=-|1|·(|y|)¶¶",
}
CASE_TEXT = "camelCase XMLFile's ÉTÉ été 日本A a/\n\ne\u0301x"
CASE_CUTS = {
    "llama-bpe": "camelCase|·XMLFile|'s|·ÉTÉ|·été|·日本A|·a|/¶¶|e|\u0301x",
    "tekken": "camel|Case|·XMLFile|'s|·ÉTÉ|·été|·日本|A|·a|/¶¶|e\u0301x",
    "gpt-4o": "camel|Case|·XMLFile's|·ÉTÉ|·été|·日本|A|·a|/¶¶|e\u0301x",
}
SAME = {
    "gpt-2": ("gpt-2",),
    "smollm": ("smollm", "refact", "starcoder"),
    "llama-bpe": ("llama-bpe", "llama3", "llama-v3", "lfm2", "smaug-bpe"),
    "qwen2": ("qwen2",),
    "default": ("default",),
    "tekken": ("tekken",),
    "gpt-4o": ("gpt-4o",),
}


def cut(name: str, text: str) -> str:
    """The words of a text, as the tables above write them."""
    words = PRE_TOKENIZERS[name].words().pre_tokenize_str(text)
    alphabet = {character: byte for byte, character in enumerate(byte_alphabet())}
    plain = "|".join(bytes(alphabet[character] for character in word).decode() for word, _ in words)
    return plain.replace(" ", "·").replace("\n", "¶")


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_t21_each_known_pre_tokenizer_cuts_as_its_models_do(name: str) -> None:
    """T21."""
    pattern = next(pattern for pattern, names in SAME.items() if name in names)
    assert cut(name, CUT_TEXT) == CUTS[pattern]
    if pattern in CASE_CUTS:
        assert cut(name, CASE_TEXT) == CASE_CUTS[pattern]


@pytest.mark.parametrize("name", ["gpt-2", "smollm"])
def test_t21_the_patterns_equal_the_library_parts_of_the_models_files(name: str) -> None:
    """T21, against the parts that the tokenizer.json files of GPT-2 and SmolLM name."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    theirs = pre_tokenizers.Sequence([*digits, byte_level])
    for text in (CUT_TEXT, *TEXTS):
        ours = PRE_TOKENIZERS[name].words().pre_tokenize_str(text)
        assert [word for word, _ in ours] == [word for word, _ in theirs.pre_tokenize_str(text)], text
