"""What transformers renders of the templates beside this file: writes rendered.json. Needs transformers and jinja2.

`python make_rendered.py` with transformers 5.24. The templates are ours; each uses what those of a model family use.
"""

import json
from pathlib import Path

import transformers
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": 'Hello there, "friend" <&>\n\tGrüße 😀 '}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi! 'What' next?"}
MORE = {"role": "user", "content": "one more"}
CALL = {"function": {"name": "add", "arguments": {"a": [1, 2.5, None], "é": "<&>"}}}
CONVERSATIONS = {
    "user": [USER],
    "system and user": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ASSISTANT, MORE],
    "no system": [USER, ASSISTANT, MORE],
    "the assistant last": [USER, ASSISTANT],
    "two users": [USER, MORE],
    "only an assistant": [ASSISTANT],
    "system in the middle": [USER, SYSTEM, MORE],
    "a call": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sum": 3}'},
        {"role": "tool", "content": "again"},
        MORE,
    ],
    "reasoning apart": [USER, {**ASSISTANT, "content": "Hi.", "reasoning_content": "why not"}, MORE, ASSISTANT],
    "a developer": [{"role": "developer", "content": "Rules."}, {**USER, "name": "Ann"}],
}
SHAPE = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": ["string", "null"]}}, "b": {"type": "number"}, "c": {}},
    "required": ["a"],
}
KWARGS = [{}, {"enable_thinking": False}, {"date_string": "1 May 2026", "reasoning_effort": "high", "shape": SHAPE}]


def rendered(source, messages, end, kwargs):
    """The text, or {"error": words}. Dates are given: transformers reads its own clock."""
    kwargs = {"date_string": "2 May 2026", **TOKENS, **kwargs}
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[messages],
            chat_template=source,
            add_generation_prompt=end == "prompt",
            continue_final_message=end == "open",
            **kwargs,
        )
    except Exception as error:
        return {"error": str(error)[:60]}
    return texts[0]


def main():
    cases = []
    for path in sorted(HERE.glob("*.jinja")):
        for name, messages in CONVERSATIONS.items():
            for kwargs in KWARGS if name == "several turns" else KWARGS[:1]:
                for end in ("prompt", "closed", *(["open"] if messages[-1]["role"] == "assistant" else [])):
                    text = rendered(path.read_text(), messages, end, kwargs)
                    if end == "open" and (isinstance(text, dict) or "FINAL_MESSAGE_TAG" in text):
                        continue  # its own refusal, or its own mark left in the text
                    cases.append([path.name, name, end, kwargs, text])
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    head = json.dumps({"reference": f"transformers {transformers.__version__}", "tokens": TOKENS})
    conversations = json.dumps(CONVERSATIONS, ensure_ascii=False)
    (HERE / "rendered.json").write_text(
        f'{head[:-1]},\n"conversations": {conversations},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
