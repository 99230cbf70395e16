"""Checkpoints as people and damaged downloads leave them: read right, or refused in words and flat memory."""

import json
import os
import tracemalloc
from itertools import permutations

import pytest
from fuzz_seeds import tokenizer_with_spaces
from tiny_checkpoint import tiny_tokenizer_json, write_json, write_tiny_gguf, write_tiny_llama
from tokenizers import Tokenizer

from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import hf_json
from mlxcel.text.chat_template import select_template

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
MUCH = 32 << 20
"""Bytes. A table of 2**24 places alone would take 128 MiB."""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_scaling": {"factor": 4.0}}, "factor = 4.0: it must be 1 or left out where no rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2}}, "factor = 2: it must be 1"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3}, "rope_parameters and rope_scaling"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding_window = 16: it must be left out"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "no sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types[1] = 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "a list, 2 times"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22: it must be left out or 1"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0]"),
    ],
)
def test_h_l1_what_would_change_the_answer_is_never_read_and_dropped(tmp_path, overrides, words):
    """Rule 2: effect or refusal, also of a scaling that names no type or stands beside another one."""
    with pytest.raises(CheckpointError) as caught:
        Llama().parse_config(SafetensorsCheckpoint(write_tiny_llama(tmp_path, config_overrides=overrides)))
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_lone_surrogate_in_a_json_file_is_refused_by_the_file(tmp_path, name):
    folder = write_tiny_llama(tmp_path)
    fields = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**fields, "eos_token": "\ud800"}))
    with pytest.raises(CheckpointError, match=f"{name} is not valid JSON.*surrogates"):
        SafetensorsCheckpoint(folder)


def test_a_pair_of_escaped_surrogates_is_a_character(tmp_path):
    folder = write_tiny_llama(tmp_path, config_overrides={"_name_or_path": "x"})
    text = (folder / "config.json").read_text().replace('"x"', r'"\ud83d\ude00"')
    (folder / "config.json").write_text(text)
    assert SafetensorsCheckpoint(folder).config["_name_or_path"] == "\U0001f600"


@pytest.mark.parametrize("highest", [1 << 22, 1 << 24, (1 << 32) - 1])
def test_one_damaged_token_id_does_not_choose_how_much_memory_is_taken(tmp_path, highest):
    """Bad input is bounded before memory is taken: a table by id of 2**32 places would be 32 GiB."""
    folder = write_tiny_llama(tmp_path)
    fields = tiny_tokenizer_json()
    fields["model"]["vocab"]["far"] = highest
    write_json(folder / "tokenizer.json", fields)
    checkpoint = SafetensorsCheckpoint(folder)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"token 'far' has the id {highest}"):
            hf_json.load(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < MUCH
    finally:
        tracemalloc.stop()


LONG_PREFIX = {"model": {**tiny_tokenizer_json()["model"], "continuing_subword_prefix": "dynamic"}}
NO_SUCH_TOKEN = {"post_processor": {**tiny_tokenizer_json(add_bos=True)["post_processor"], "special_tokens": {}}}
UNSAID_TOKEN = {
    "post_processor": {"type": "TemplateProcessing", "single": "x:0 $A", "pair": "$A $B", "special_tokens": []}
}


@pytest.mark.parametrize("damage", [LONG_PREFIX, NO_SUCH_TOKEN, UNSAID_TOKEN])
def test_a_tokenizer_that_makes_the_library_fail_is_a_damaged_one(tmp_path, damage):
    """A panic of compiled code is no Exception: a prefix longer than a token, a template of tokens that it lacks."""
    folder = write_tiny_llama(tmp_path)
    write_json(folder / "tokenizer.json", {**tiny_tokenizer_json(), **damage})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: "):
        hf_json.load(SafetensorsCheckpoint(folder))


@pytest.mark.parametrize("order", list(permutations(("ByteFallback", "Strip", "Fuse"))))
def test_a_decoder_in_another_order_means_what_it_says(tmp_path, order):
    """A space dropped before the tokens are one text is dropped of each of them. Against the library itself."""
    folder = write_tiny_llama(tmp_path)
    fields = tokenizer_with_spaces()
    steps = {step["type"]: step for step in fields["decoder"]["decoders"]}
    fields["decoder"]["decoders"] = [steps["Replace"], *(steps[kind] for kind in order)]
    write_json(folder / "tokenizer.json", fields)
    ours, library = hf_json.load(SafetensorsCheckpoint(folder)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = library.encode("the inn  on a mat").ids
    assert ours.decode(ids, skip_special=False) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("tokens", [0, True, None, "ab", [3, 4], []])
def test_a_template_is_chosen_whatever_the_tokens_are(tmp_path, tokens):
    """They are the tokenizer's to refuse."""
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf"))
    checkpoint.assets = {"gguf": {**checkpoint.assets["gguf"], "tokenizer.ggml.tokens": tokens}}
    template = select_template(checkpoint)
    assert template is not None
    assert template.special_tokens == {}


def test_h_l16_suffixes_of_any_case_are_shards_and_hidden_files_are_none(tmp_path):
    """macOS leaves `._model.safetensors` on other file systems; the detector takes suffixes of any case."""
    folder = write_tiny_llama(tmp_path)
    wanted = set(SafetensorsCheckpoint(folder).tensors)
    (folder / "model.safetensors").rename(folder / "MODEL.SAFETENSORS")
    (folder / "._model.safetensors").write_bytes(b"\0\5\x16\7junk")
    assert set(SafetensorsCheckpoint(folder).tensors) == wanted


def test_a_folder_whose_name_is_not_utf_8_is_read(tmp_path):
    try:
        folder = write_tiny_llama(tmp_path / os.fsdecode(b"\xff"))
    except OSError:
        pytest.skip("this file system takes no such name")
    assert hf_json.load(SafetensorsCheckpoint(folder)).encode("a", add_special=False)


@pytest.mark.parametrize("mode", [0o000])
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_tokenizer_that_may_not_be_read_is_no_damaged_file(tmp_path, mode):
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer.json").chmod(mode)
    with pytest.raises(CheckpointError, match="Permission denied"):
        hf_json.load(SafetensorsCheckpoint(folder))
