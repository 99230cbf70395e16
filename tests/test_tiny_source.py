"""The toy model `tiny`: written on this machine, the same bytes on all."""

import hashlib
import json
import socket

import numpy as np
import pytest
from real_engine import real_engine
from reference_forward import forward
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mlxcel.core.source import NoProgress
from mlxcel.plugins.families.tiny import Tiny
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.manager import PluginManager
from mlxcel.plugins.sources.tiny import SOURCE
from mlxcel.plugins.sources.tiny_writer import fetch, uniform
from mlxcel.plugins.tokenizers.hf_json import load
from mlxcel.resolve import resolve_model
from mlxcel.store import ModelStore
from mlxcel.testing.family_kit import check_family
from mlxcel.text.chat_template import select_template
from mlxcel.text.end_ids import end_ids
from mlxcel.text.generation_config import GenerationDefaults
from mlxcel.text.prompt import encode_chat

END, TURN_START, TURN_END = 256, 257, 258


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("tiny")
    fetch(target, NoProgress())
    return target


@pytest.fixture(scope="module")
def checkpoint(folder):
    return SafetensorsCheckpoint(folder)


def test_the_files_have_the_hashes_of_the_source(folder):
    files = {file.name: file.sha256 for file in SOURCE.files}
    written = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert written.pop("LICENSE")
    assert written == files


def test_the_store_takes_it_without_a_network(tmp_path, monkeypatch):
    def no_network(*args, **options):
        raise AssertionError("a socket was asked for")

    monkeypatch.setattr(socket, "socket", no_network)
    store, sources = ModelStore(tmp_path), PluginManager.load(only=(), trace=None).model_sources()
    assert sources["tiny"] == SOURCE
    found = resolve_model("tiny", sources=sources, store=store, offline=False)
    assert found.path == tmp_path / "tiny"
    assert resolve_model("tiny", sources=sources, store=store, offline=True) == found


def test_weights_are_splitmix64_of_their_names_and_places(folder):
    """Against Python's integers, and read by the safetensors library."""
    name, mask = "model.layers.1.self_attn.k_proj.weight", 2**64 - 1
    tensors = load_file(folder / "model.safetensors")
    state = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    for value in tensors[name].ravel()[:500].tolist():
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        assert value == (((z ^ z >> 31) >> 40) / 2**23 - 1) / 4
        state = state + 0x9E3779B97F4A7C15 & mask
    many = uniform("any", 300, 300)
    assert -1 <= many.min() < -0.999 < 0.999 < many.max() < 1
    assert abs(many.mean()) < 0.01
    assert abs(many.var() - 1 / 3) < 0.01


def test_it_passes_the_conformance_kit(folder, checkpoint):
    tensors = load_file(folder / "model.safetensors")
    check_family(Tiny(), checkpoint, reference=lambda ids: forward(tensors, checkpoint.config, ids, dtype=np.float64))


def test_each_byte_is_a_token_and_any_text_comes_back(folder, checkpoint):
    library, ours = Tokenizer.from_file(str(folder / "tokenizer.json")), load(checkpoint)
    text = "".join(map(chr, range(0x250))) + "日本 👋🏽"
    ids = ours.encode(text, add_special=True)
    assert list(ids) == list(text.encode()) == library.encode(text).ids
    assert library.decode(ids) == text
    assert ours.size == checkpoint.config["vocab_size"] == TURN_END + 1


def test_a_chat_is_rendered_and_both_ends_end_it(checkpoint):
    tokenizer = load(checkpoint)
    ids = encode_chat(tokenizer, select_template(checkpoint), [{"role": "user", "content": "Hi"}], now=0).ids
    turn = [TURN_START, *b"user\nHi", TURN_END, *b"\n"]
    assert list(ids) == [*turn, TURN_START, *b"assistant\n"]
    defaults = GenerationDefaults.read("auto", checkpoint)
    found = end_ids(checkpoint.config, defaults, tokenizer, (), tokenizer.size)
    assert found.ids == {END, TURN_END}
    assert not found.warnings


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_it_says_can_be_read(checkpoint, temperature):
    real = real_engine(checkpoint, Tiny(), tokenizer=load(checkpoint))
    for prompt in (b"hello", b"The sky is", b"\xff"):
        _, drawn = real.alone(list(prompt), 31, temperature=temperature, seed=1)
        readable = [token for token in drawn if 0x20 <= token < 0x7F or token == TURN_END]
        assert len(readable) >= 30, bytes(token for token in drawn if token < 256)


def test_json_is_plain(folder):
    """Read by anything: ASCII, and ids of the vocabulary in order."""
    text = (folder / "tokenizer.json").read_bytes()
    assert text.isascii()
    assert list(json.loads(text)["model"]["vocab"].values()) == list(range(TURN_END + 1))
