"""Makes the model files of this folder and vectors.json, ids and texts as `sentencepiece` itself has them.

    python make_models.py      # needs sentencepiece; its version is kept in vectors.json

Each vector is a text, its ids, and the text that these ids decode to.
"""

from __future__ import annotations

import json
import os
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import sentencepiece

FOLDER = Path(__file__).parent
LINES = (
    "the a an of to in and is was it that for on with as at by from or be this are not they we you all can has her one",
    "river stone light water mountain garden window letter number question answer morning evening reading writing",
    "running quickly slowly never always model token tokenizer sentence piece space byte merge score return def class",
    "import print x y i self none true false 0 1 2 10 42 100 2024 3.14 été déjà naïve coöperate straße größe señor",
    "mañana привет мир вода свет 日本 日本語 文章 中文 水 山 東京",
)
WORDS = tuple(word for line in LINES for word in line.split())
CAPITALS = tuple((chr(code), chr(code + 32)) for code in range(ord("A"), ord("Z") + 1))
RULES = (
    *CAPITALS,
    *(("\ufb01", "fi"), ("e\u0301", "é"), ("E\u0301", "é"), ("É", "é"), ("\uff11", "1")),
    *(("\u3000", " "), ("\u00a0", " "), ("\u200b", "")),
)
TEXTS = (
    *("", " ", "  ", "a", " a", "a ", "The river runs to the garden.", "THE RIVER", "watermountaingardenwindow"),
    "   leading,  double   triple \t tabs \n \n newlines   ",
    "def f(x):\n    return {'a': x[0] ** 2}  # naïve\n\n\n\tif x != None: pass\r\n",
    "Él está aquí — «déjà vu», e\u0301 alone",
    "日本語の文章です。中文也一样，한국어도.",
    "🙂👩\u200d👩\u200d👧\u200d👦🇩🇪 emoji",
    "1234567 3.14159 ½ ② ٣٤ 12:30",
    "\u00a0\u2003\u3000 exotic\u200b\ufeff spaces",
    "a literal ▁ and ▁▁ in text",
    *("ends with ▁", "ends with ▁ ", "E\u0301te\u0301 E\u0301 E e"),
    "<s>not control</s> <unk> <0x41>",
    "[INST] x [/INST]",
    *("x" * 40, "ab" * 20, "=" * 33, " " * 33, "e" * 17 + "é" * 5),
    "\ufb01nd the \uff11st \ufb01eld",
    *("a\u0000b", "tab\tnewline\nreturn\r"),
)
SPACES = ["\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁"]
BPE = {"model_type": "bpe", "vocab_size": 560, "byte_fallback": True}
UNIGRAM = {"model_type": "unigram", "vocab_size": 520}
MODELS = {
    "bpe": {**BPE, "user_defined_symbols": ["[INST]", "[/INST]"]},
    "bpe_gemma": {**BPE, "add_dummy_prefix": False, "user_defined_symbols": [*SPACES, "[INST]"]},
    "unigram": {**UNIGRAM, "vocab_size": 300, "remove_extra_whitespaces": True, "normalization_rule_tsv": "rules.tsv"},
    "unigram_bytes": {**UNIGRAM, "byte_fallback": True, "user_defined_symbols": ["[INST]"]},
}
DEFAULTS = {
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
    "character_coverage": 1.0,
    "hard_vocab_limit": False,
    "minloglevel": 2,
}


def sentences() -> list[str]:
    rng = random.Random(7)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) + rng.choice((".", "?", "!", ";")) for _ in range(3000)]


def texts() -> list[str]:
    rng = random.Random(11)
    others = (
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "a",
        "e",
        "ee",
        "e\u0301",
        "é",
        "😀",
        "字",
        "[INST]",
        "[",
        "▁",
        "-",
        "--",
        "\u3000",
    )
    mixed = ["".join(rng.choices((*WORDS, *others), k=rng.randint(1, 12))) for _ in range(60)]
    repeated = [rng.choice(("a", "e", "er", "th", "in", " t", "日")) * rng.randint(2, 30) for _ in range(20)]
    return [*TEXTS, *mixed, *repeated]


def write_rules() -> Path:
    """Replacements as hexadecimal code points."""
    path = FOLDER / "rules.tsv"
    lines = ("\t".join(" ".join(f"{ord(c):X}" for c in side) for side in rule) for rule in RULES)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def main() -> None:
    os.chdir(FOLDER)  # the model keeps the name of its rules
    rules = write_rules()
    vectors: dict[str, Any] = {"sentencepiece": sentencepiece.__version__, "models": {}}
    for name, options in MODELS.items():
        settings = {**DEFAULTS, **options}
        if "normalization_rule_tsv" in settings:
            del settings["normalization_rule_name"]
        data = BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences()), model_writer=data, **settings)
        (FOLDER / f"{name}.model").write_bytes(data.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=data.getvalue())
        cases = [(text, processor.encode(text)) for text in texts()]
        vectors["models"][name] = [[text, ids, processor.decode(ids)] for text, ids in cases]
    rules.unlink()
    (FOLDER / "vectors.json").write_text(json.dumps(vectors, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
