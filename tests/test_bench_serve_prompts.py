"""Prompts of `mlxcel bench serve`: random ones of exact lengths, whoever counts, and those of a file
(docs/spec/clients.md 8.1, 8.4: 6)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama
from tokenizers import Tokenizer

from mlxcel.errors import ServerError, UsageError
from mlxcel.remote_http import Address
from mlxcel.tools.bench_serve import bench_serve
from mlxcel.tools.load.dataset import Asked, file_prompts
from mlxcel.tools.load.lengths import ServerCounter, TokenizerCounter, WordCounter
from mlxcel.tools.load.options import LoadOptions, RandomSizes
from mlxcel.tools.load.random_prompts import WORDS, random_prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    """Real: it has a tokenizer that adds BOS, and a prompt cache."""
    with running(model, backend="reference-numpy", max_num_seqs=4) as made:
        yield made


@attrs.frozen
class LetterCounter:
    """As the word is, so many tokens, and three around it: no word is one token."""

    source: str = "letters"

    def count(self, text: str) -> int:
        return 3 + len(text)


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [WordCounter(), LetterCounter()], ids=["words", "letters"])
@pytest.mark.parametrize("prefix", [0, 9])
def test_random_prompts_have_as_many_tokens_as_they_should(counts: Any, prefix: int) -> None:
    sizes = RandomSizes(input_len=50, output_len=20, range_ratio=0.5, prefix_len=prefix)
    asked, missed = random_prompts(60, sizes, counts, seed=1)
    assert missed == 0
    lengths = [counts.count(str(each.prompt)) for each in asked]
    assert lengths == [each.input_len for each in asked]
    assert all(25 + prefix <= length <= 75 + prefix for length in lengths)
    assert all(10 <= each.output_len <= 30 for each in asked)
    assert len(set(lengths)) > 10
    assert len({each.prompt for each in asked}) == 60
    starts = {str(each.prompt)[: prefix - 3] for each in asked}
    assert (len(starts) == 1) == (prefix > 0), "the prefix is the same for all"


@attrs.define
class AskedCounter:
    """Counts words, and how often it is asked."""

    source: str = "words"
    asked: int = 0

    def count(self, text: str) -> int:
        self.asked += 1
        return len(text.split())


def test_a_server_is_asked_about_the_prompts_and_hardly_about_words() -> None:
    """Each question is a request, and a line in another server's log."""
    counts = AskedCounter()
    random_prompts(5, RandomSizes(input_len=30), counts, 4)
    assert counts.asked == 2 + 5


def test_the_seed_fixes_the_prompts() -> None:
    sizes = RandomSizes(input_len=30)
    first = random_prompts(5, sizes, WordCounter(), 4)
    assert first == random_prompts(5, sizes, WordCounter(), 4)
    assert first != random_prompts(5, sizes, WordCounter(), 5)
    assert {each.output_len for each in first[0]} == {128}


def test_lengths_that_no_text_has_are_told() -> None:
    """Two tokens where three are around each text: the shortest text that there is, and said so."""
    asked, missed = random_prompts(3, RandomSizes(input_len=2), LetterCounter(), 0)
    assert missed == 3
    assert all(each.prompt for each in asked)


def test_exact_lengths_are_what_the_server_reads(server: ScriptServer) -> None:
    """8.4, 6: by its /tokenize; its usage, BOS included, is what was asked for. The shared prefix comes from its prompt
    cache for all but the first."""
    sizes = RandomSizes(input_len=40, output_len=4, prefix_len=64)
    options = LoadOptions(Address.parse(server.url, None), num_prompts=6, sizes=sizes, max_concurrency=1, num_warmups=0)
    found = bench_serve(options)
    assert found.failures == ()
    assert found.detail["input_lens"] == [104] * 6
    assert found.fields["total_input_tokens"] == 6 * 104
    assert found.fields["total_output_tokens"] == 6 * 4
    assert found.fields["length_source"] == "server"
    assert found.fields["cached_tokens"] >= 5 * 48
    assert (found.fields["model_id"], found.fields["server_version"]) == ("tiny", "0.1.0")


def test_a_tokenizer_counts_as_the_server_does(server: ScriptServer, model: Path) -> None:
    sizes = RandomSizes(input_len=33, output_len=2, range_ratio=0.2)
    options = LoadOptions(Address.parse(server.url, None), num_prompts=5, sizes=sizes, tokenizer=model)
    found = bench_serve(options)
    assert found.fields["length_source"] == "tokenizer"
    asked, _ = random_prompts(6, sizes, TokenizerCounter.load(model, special=True), 0)
    assert found.detail["input_lens"] == [each.input_len for each in asked[:5]]


def test_of_a_chat_the_text_has_the_length(server: ScriptServer, model: Path) -> None:
    """What the template adds is beside it."""
    options = LoadOptions(
        Address.parse(server.url, None), endpoint_type="openai-chat", num_prompts=2,
        sizes=RandomSizes(input_len=20, output_len=2),
    )  # fmt: skip
    found = bench_serve(options)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    around = len(
        tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
    )
    assert found.failures == ()
    assert found.detail["input_lens"] == [20 + around] * 2


@pytest.mark.parametrize("shape", ["content", "prompt", "neither", "empty"])
def test_either_shape_of_tokenize_is_understood(shape: str) -> None:
    """llama.cpp's, vLLM's, which refuses the former, and servers that have none or tell nothing: then nobody counts."""

    def call(method: str, route: str, body: dict[str, Any]) -> Any:
        assert (method, route, body["model"]) == ("POST", "/tokenize", "m")
        if shape == "empty":
            return {"tokens": []}
        if shape not in body:
            raise ServerError("no", status=404)
        assert body["add_special" if shape == "content" else "add_special_tokens"] is True
        return {"tokens": [1, *body[shape].encode()]}

    found = ServerCounter.find(call, "m", special=True)
    assert (None if found is None else found.count("abc")) == (4 if shape in ("content", "prompt") else None)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="--tokenizer"):
            TokenizerCounter.load(path, special=True)


# --- files ------------------------------------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "hi"}]


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    def write(*entries: Any) -> Path:
        path = tmp_path / "asked.jsonl"
        path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in entries))
        return path

    return write


def test_a_file_has_a_request_a_line(lines: Callable[..., Path]) -> None:
    path = lines({"prompt": "a", "output_len": 3}, "", {"messages": TURNS}, {"prompt": "c"})
    wanted = [Asked("a", None, 3), Asked(tuple(TURNS), None, 9), Asked("c", None, 9)]
    assert file_prompts(path, 10, chat=True, output_len=9) == wanted
    assert file_prompts(path, 2, chat=True, output_len=9) == wanted[:2]


BAD: tuple[tuple[Any, str], ...] = (
    ("{", "no JSON"),
    ("[1]", "must be an object"),
    ({"prompt": "a", "messages": TURNS}, "one of prompt and messages"),
    ({"output_len": 3}, "one of prompt and messages"),
    ({"prompt": ""}, "must be a text"),
    ({"prompt": [1]}, "must be a text"),
    ({"prompt": "a", "output_len": 0}, "integer of 1 or more"),
    ({"prompt": "a", "output_len": True}, "integer of 1 or more"),
    ({"prompt": "a", "max_tokens": 3}, "'max_tokens', which means nothing"),
    ({"messages": []}, "list of objects"),
    ({"messages": ["a"]}, "list of objects"),
)


@pytest.mark.parametrize(("entry", "says"), BAD)
def test_a_bad_line_is_named(lines: Callable[..., Path], entry: Any, says: str) -> None:
    with pytest.raises(UsageError, match=r"line 2\b") as caught:
        file_prompts(lines({"prompt": "a"}, entry), 10, chat=True, output_len=9)
    assert says in str(caught.value)


def test_a_file_that_is_none_is_refused(lines: Callable[..., Path], tmp_path: Path) -> None:
    for path, says in ((lines(""), "no line"), (tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(UsageError, match=says):
            file_prompts(path, 10, chat=True, output_len=9)
    with pytest.raises(UsageError, match="has messages") as caught:
        file_prompts(lines({"messages": TURNS}), 10, chat=False, output_len=9)
    assert "openai-chat" in str(caught.value.hint)


def test_a_load_of_a_file(server: ScriptServer, lines: Callable[..., Path]) -> None:
    """Fewer lines than --num-prompts are all that is sent; warm-ups take what is left, or begin again."""
    path = lines({"prompt": "in the", "output_len": 2}, {"prompt": "of a " * 9, "output_len": 5})
    options = LoadOptions(Address.parse(server.url, None), dataset=path, num_prompts=7, num_warmups=3)
    found = bench_serve(options)
    assert (found.fields["num_prompts"], found.fields["completed"]) == (2, 2)
    assert found.detail["output_lens"] == [2, 5]
    assert found.fields["length_source"] == "usage"
    assert found.detail["input_lens"][0] < found.detail["input_lens"][1]


def test_no_word_is_left_out() -> None:
    """However many tokens it has."""
    asked, _ = random_prompts(40, RandomSizes(input_len=200), LetterCounter(), 0)
    assert set(WORDS.split()) <= {word.strip(".") for each in asked for word in str(each.prompt).split()}
