"""Texts that take their time to encode (engine specification 6.4)."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import hf_json
from mlxcel.plugins.tokenizers.library import LONG


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("long") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return hf_json.load(SafetensorsCheckpoint(folder))


@pytest.mark.parametrize("length", [LONG - 1, LONG, LONG + 1, 4 * LONG])
@pytest.mark.parametrize("parse_special", [True, False])
def test_a_long_text_is_encoded_as_a_short_one(
    folder: Path, tokenizer: Tokenizer, length: int, parse_special: bool
) -> None:
    """The ids of the library's plain call, whichever way it is asked."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = not parse_special
    text = ("<|im_start|>na\u00efve \U0001f642\n  x1 " * length)[:length]
    expected = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special=False, parse_special=parse_special) == expected


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """A server goes on answering. Threads are not made to give way here: each runs until it lets go."""
    turns, over, before = 0, threading.Event(), sys.getswitchinterval()

    def count() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)

    counting = threading.Thread(target=count)
    counting.start()
    sys.setswitchinterval(60)
    try:
        seen = turns
        for _ in range(5):  # on a busy machine it is not the other thread's turn each time
            tokenizer.encode("ab " * 20 * LONG, add_special=False)
            if turns > seen:
                break
        assert turns > seen
    finally:
        sys.setswitchinterval(before)
        over.set()
        counting.join()
