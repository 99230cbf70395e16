"""Where the chat template comes from, and the special tokens that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from tiny_checkpoint import write_json, write_tiny_gguf, write_tiny_llama

from mlxcel.errors import CheckpointError, RequestError, TemplateError, UsageError
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.text.chat_template import ChatTemplate, select_template

NOON = 1_700_000_000.0
USER = [{"role": "user", "content": "hello there"}]


@attrs.frozen
class Assets:
    """As much of a checkpoint as a template needs."""

    assets: dict[str, Any]
    path: Path = Path("model")


def selected(assets: dict[str, Any], **flags: Any) -> ChatTemplate | None:
    return select_template(Assets(assets), **flags)  # type: ignore[arg-type]  # a part of one


SOURCES: list[tuple[str, Any]] = [
    ("chat_template.jinja", "{{ 'jinja' }}"),
    ("chat_template.json", {"chat_template": "{{ 'json' }}"}),
    ("tokenizer_config.json", {"chat_template": "{{ 'config' }}"}),
    ("gguf", {"tokenizer.chat_template": "{{ 'gguf' }}", "tokenizer.chat_template.tool_use": "{{ 'tools' }}"}),
]


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_sources_in_their_order(first: int) -> None:
    """T12."""
    found = selected(dict(reversed(SOURCES[first:])))
    assert found is not None
    assert found.source == f"{{{{ '{('jinja', 'json', 'config', 'gguf')[first]}' }}}}"


def test_the_operators_template_is_first(tmp_path: Path) -> None:
    """T12."""
    file = tmp_path / "my.jinja"
    file.write_text("{{ 'fïle' }}", encoding="utf-8")
    for flags, text in (({"flag_text": "{{ 'flag' }}"}, "flag"), ({"flag_file": file}, "fïle")):
        found = selected(dict(SOURCES), **flags)
        assert found is not None
        assert text in found.source


@pytest.mark.parametrize(
    "assets",
    [
        {},
        {"tokenizer_config.json": {}},
        {"tokenizer_config.json": {"chat_template": None}},
        {"gguf": {"tokenizer.chat_template.tool_use": "x"}},
    ],
)
def test_no_template_is_none(assets: dict[str, Any]) -> None:
    assert selected(assets) is None


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
        ({"default": "d", "rag": "r"}, "d"),
    ],
)
def test_of_named_templates_default_is_taken(value: Any, source: str) -> None:
    found = selected({"tokenizer_config.json": {"chat_template": value}})
    assert found is not None
    assert found.source == source
    named = selected({"gguf": {"tokenizer.chat_template.default": "d"}})
    assert named is not None
    assert named.source == "d"


@pytest.mark.parametrize("value", [5, ["x"], [{"name": "default"}], {"default": 5}])
def test_a_template_that_is_no_text_is_an_error_of_the_checkpoint(value: Any) -> None:
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        selected({"tokenizer_config.json": {"chat_template": value}})


@pytest.mark.parametrize(
    "source", ["{% if", "{{ x | no_such_filter }}", "chatml", "", "{% for m in messages %}", "{{ 1 }}" + "x" * 2**20]
)
def test_an_operators_template_that_cannot_work_is_a_start_error(source: str, tmp_path: Path) -> None:
    """T17. The name of a file, or of a built-in template of other servers, is no template."""
    file = tmp_path / "bad.jinja"
    file.write_text(source)
    with pytest.raises(UsageError, match="--chat-template"):
        selected({}, flag_text=source)
    with pytest.raises(UsageError, match=r"bad\.jinja"):
        selected({}, flag_file=file)


@pytest.mark.parametrize("kwargs", [{"messages": []}, {"bos_token": "x"}, {"tools": None}])
def test_reserved_names_of_the_operator_are_start_errors(kwargs: dict[str, Any]) -> None:
    """T16: as are kwargs without a template to act on."""
    assets = {"chat_template.jinja": "{{ messages[0].content }}"}
    with pytest.raises(UsageError, match="--chat-template-kwargs.*" + next(iter(kwargs))):
        selected(assets, flag_kwargs=kwargs)
    with pytest.raises(UsageError, match="--chat-template-kwargs"):
        selected({}, flag_kwargs={"tone": 1})
    assert selected({}, flag_kwargs={}) is None
    found = selected(assets, flag_kwargs={"tone": 1})
    assert found is not None
    assert found.render(USER, now=NOON) == "hello there"


def test_unreadable_template_files_are_start_errors(tmp_path: Path) -> None:
    (tmp_path / "latin.jinja").write_bytes(b"{{ '\xe9' }}")
    for file in (tmp_path / "no.jinja", tmp_path, tmp_path / "latin.jinja"):
        with pytest.raises(UsageError, match="chat-template-file"):
            selected({}, flag_file=file)
    with pytest.raises(UsageError, match="both"):
        selected({}, flag_file=tmp_path / "no.jinja", flag_text="{{ 1 }}")


def test_a_broken_template_of_the_checkpoint_fails_its_renders_only() -> None:
    """Raw prompts still run."""
    found = selected({"chat_template.jinja": "{% if"})
    assert found is not None
    with pytest.raises(TemplateError, match="unexpected") as caught:
        found.render(USER, now=NOON)
    assert "chat_template.jinja" in str(caught.value.hint)


def test_special_tokens_come_from_the_files_beside_the_template(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "hf")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    show = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}"
    settings |= {"bos_token": {"content": "<|im_start|>"}, "chat_template": show, "image_token": "<img>"}
    write_json(folder / "tokenizer_config.json", {**settings, "add_bos_token": True, "unk_token": None})
    write_json(folder / "special_tokens_map.json", {"bos_token": "<|bos|>", "pad_token": "<|eos|>"})
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.padding_token_id": 3})
    for checkpoint, text in (
        (SafetensorsCheckpoint(folder), "<|im_start|><|eos|><|eos|><img>"),
        (GgufCheckpoint(gguf), "<|bos|><|eos|><|im_end|>"),
    ):
        found = select_template(checkpoint, flag_text=show)
        assert found is not None
        with pytest.raises(RequestError, match="does not appear"):
            found.render(USER, now=NOON)
        by_flag = select_template(checkpoint, flag_text=f"{show}{{{{ messages[0].content }}}}")
        assert by_flag is not None
        assert by_flag.render(USER, now=NOON) == f"{text}hello there"
