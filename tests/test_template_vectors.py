"""Templates with what those of known models use, against what transformers renders of them (data/templates)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxcel.errors import TemplateError
from mlxcel.text.chat_template import ChatTemplate

FOLDER = Path(__file__).parent / "data" / "templates"
VECTORS: dict[str, Any] = json.loads((FOLDER / "rendered.json").read_text(encoding="utf-8"))
DATE = {"date_string": "2 May 2026"}
"""As make_rendered.py gives it."""


@pytest.mark.parametrize(
    ("file", "conversation", "end", "kwargs", "text"),
    VECTORS["cases"],
    ids=[f"{file}-{name}-{end}-{len(kwargs)}" for file, name, end, kwargs, _ in VECTORS["cases"]],
)
def test_rendered_as_transformers_renders(
    file: str, conversation: str, end: str, kwargs: dict[str, Any], text: Any
) -> None:
    """T12, T13, T15, T16; T17 where the template refuses, with its words."""
    source = (FOLDER / file).read_text(encoding="utf-8")
    template = ChatTemplate(source, special_tokens=VECTORS["tokens"], origin=file, keeps_texts=False)
    messages = VECTORS["conversations"][conversation]

    def render() -> str:
        return template.render(
            messages,
            add_generation_prompt=end == "prompt",
            continue_final_message=end == "open",
            kwargs={**DATE, **kwargs},
            now=0.0,
        )

    if isinstance(text, str):
        assert render() == text
    else:
        with pytest.raises(TemplateError) as caught:
            render()
        assert text["error"] in caught.value.message


def test_every_template_is_rendered_and_refuses_no_more_than_half() -> None:
    """The vectors are about what templates write."""
    files = {path.name for path in FOLDER.glob("*.jinja")}
    assert files == {case[0] for case in VECTORS["cases"]}
    for file in files:
        texts = [case[4] for case in VECTORS["cases"] if case[0] == file]
        assert sum(isinstance(text, str) for text in texts) * 2 >= len(texts)
