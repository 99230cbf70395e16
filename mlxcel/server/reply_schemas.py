"""What replies hold, as JSON schemas: the half of the OpenAPI document that no record reads
(docs/spec/clients.md 3.2, 3.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxcel.core.result import OPENAI_REASON

Schema = dict[str, Any]

PREFIX: Final = "#/components/schemas/"

_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_NUMBER: Final = {"type": "number"}
_TRUTH: Final = {"type": "boolean"}
_OBJECT: Final = {"type": "object"}
_NULL: Final = {"type": "null"}


def _ref(name: str) -> Schema:
    return {"$ref": f"{PREFIX}{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _table(values: Schema) -> Schema:
    """An object of any keys."""
    return {"type": "object", "additionalProperties": values}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": sorted(required), "properties": {**required, **(optional or {})}}


_WARNINGS: Final = {"warnings": _list(_STRING)}
_IDS: Final = _list(_COUNT)
_BYTES: Final = _list({"type": "integer", "minimum": 0, "maximum": 255})
_BY_ID: Final = _list(
    _or_null(_table(_object({"logprob": _or_null(_NUMBER), "rank": _or_null(_COUNT), "decoded_token": _STRING})))
)
_PROMPT_SCORES: Final = {"prompt_logprobs": _BY_ID}
_FINISH: Final[Mapping[str, Schema]] = {
    "index": _COUNT,
    "finish_reason": {"enum": sorted({reason for reason in OPENAI_REASON.values() if reason is not None})},
    "stop_reason": {"anyOf": [_STRING, _INTEGER, _OBJECT, _NULL]},
    "finish_cause": _STRING,
}
_TOKEN: Final[Mapping[str, Schema]] = {"token": _STRING, "logprob": _or_null(_NUMBER), "bytes": _BYTES}

_CHAT_CHOICE: Final = _object(
    {
        **_FINISH,
        "message": _object(
            {"role": {"const": "assistant"}, "content": _STRING, "refusal": _NULL}, {"reasoning_content": _STRING}
        ),
        "logprobs": _or_null(
            _object(
                {"content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})), "refusal": _NULL},
                {"by_id": _BY_ID},
            )
        ),
    },
    {"token_ids": _IDS},
)
_TEXT_CHOICE: Final = _object(
    {
        **_FINISH,
        "text": _STRING,
        "logprobs": _or_null(
            _object(
                {
                    "tokens": _list(_STRING),
                    "token_logprobs": _list(_or_null(_NUMBER)),
                    "top_logprobs": _list(_or_null(_table(_or_null(_NUMBER)))),
                    "text_offset": _IDS,
                },
                {"by_id": _BY_ID},
            )
        ),
    },
    {"reasoning_content": _STRING, "token_ids": _IDS, "prompt_token_ids": _IDS, **_PROMPT_SCORES},
)
_USAGE: Final = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT, "truncated_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    }
)
_OF_OPENAI: Final[Mapping[str, Schema]] = {
    "id": _STRING,
    "created": _INTEGER,
    "model": _STRING,
    "system_fingerprint": _STRING,
    "usage": _USAGE,
}
_NATIVE_TOKEN: Final[Mapping[str, Schema]] = {"id": _COUNT, "token": _STRING, "bytes": _BYTES}
_CHANCE: Final = {name: _or_null(_NUMBER) for name in ("logprob", "prob")}
_BEST: Final = _list(_object(_NATIVE_TOKEN, _CHANCE))
_PART_OF_REPLY: Final = {"type": "object", "description": "What `response_fields` leaves of it."}
_NATIVE: Final = {"anyOf": [_ref("NativeReply"), _PART_OF_REPLY]}
_ORIGIN: Final = _table(_STRING)

SCHEMAS: Final[Mapping[str, Schema]] = {
    "ChatReply": _object(
        {**_OF_OPENAI, "object": {"const": "chat.completion"}, "choices": _list(_CHAT_CHOICE)},
        {"prompt_token_ids": _IDS, **_PROMPT_SCORES, **_WARNINGS},
    ),
    "CompletionReply": _object(
        {**_OF_OPENAI, "object": {"const": "text_completion"}, "choices": _list(_TEXT_CHOICE)}, _WARNINGS
    ),
    "NativeReply": _object(
        {
            "index": _COUNT,
            "content": _STRING,
            "tokens": _IDS,
            "id_slot": _INTEGER,
            "stop": {"const": True},
            "model": _STRING,
            "tokens_predicted": _COUNT,
            "tokens_evaluated": _COUNT,
            "generation_settings": _OBJECT,
            "prompt": _STRING,
            "has_new_line": _TRUTH,
            "truncated": _TRUTH,
            "stop_type": {"enum": ["eos", "limit", "word"]},
            "stopping_word": _STRING,
            "tokens_cached": _COUNT,
            "timings": _table(_or_null(_NUMBER)),
            "finish_cause": _STRING,
        },
        {
            "reasoning_content": _STRING,
            "completion_probabilities": _list(
                _object(_NATIVE_TOKEN, {**_CHANCE, "top_logprobs": _BEST, "top_probs": _BEST})
            ),
            **_PROMPT_SCORES,
            **_WARNINGS,
        },
    ),
    "NativeReplies": {"anyOf": [_NATIVE, _list(_NATIVE)]},
    "MessageReply": _object(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "content": _list(_object({"type": {"const": "text"}, "text": _STRING})),
            "model": _STRING,
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence"]},
            "stop_sequence": _or_null(_STRING),
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            ),
            "finish_cause": _STRING,
        },
        _WARNINGS,
    ),
    "TokenCount": _object({"input_tokens": _COUNT}),
    "Tokenized": _object(
        {
            "tokens": {
                "anyOf": [_IDS, _list(_object({"id": _COUNT, "piece": {"anyOf": [_STRING, _BYTES]}}))],
            },
            "count": _COUNT,
            "max_model_len": _COUNT,
        }
    ),
    "Detokenized": _object({"content": _STRING, "prompt": _STRING}),
    "Rendered": _object(
        {"prompt": _STRING},
        {"token_ids": _IDS, "sampling": _OBJECT, "template_source": _or_null(_STRING), **_WARNINGS},
    ),
    "Model": _object(
        {
            "id": _STRING,
            "object": {"const": "model"},
            "created": _INTEGER,
            "owned_by": _STRING,
            "root": _STRING,
            "parent": _NULL,
            "max_model_len": _COUNT,
            "meta": _table(_or_null(_COUNT)),
        }
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Props": _object(
        {
            "default_generation_settings": _object({"params": _OBJECT, "n_ctx": _COUNT}),
            "total_slots": _COUNT,
            **dict.fromkeys(("model_alias", "model_path", "chat_template", "bos_token", "eos_token"), _STRING),
            **dict.fromkeys(("build_info", "backend", "device", "level", "kv_storage"), _STRING),
            "modalities": _table(_TRUTH),
            "is_sleeping": _TRUTH,
            "prefill_chunk": _COUNT,
            "samplers": _list(_STRING),
            "eos_token_ids": _IDS,
            "origin": _ORIGIN,
            "endpoints": _table(_TRUTH),
        }
    ),
    "Slots": _list(
        _object(
            {
                "id": _INTEGER,
                "n_ctx": _COUNT,
                "is_processing": _TRUTH,
                "id_task": _INTEGER,
                "params": _OBJECT,
                "next_token": _object({"has_next_token": _TRUTH, "n_remain": _INTEGER, "n_decoded": _COUNT}),
                "state": _STRING,
                "prompt_tokens": _COUNT,
                "prompt_done": _COUNT,
                "cached_tokens": _COUNT,
                "cache_miss_reason": _or_null(_STRING),
                "request_id": _or_null(_STRING),
            }
        )
    ),
    "Health": _object({"status": {"const": "ok"}}),
    "Version": _object({"version": _STRING, "commit": _STRING}),
    "CacheStats": _object(
        {
            "enabled": _TRUTH,
            **dict.fromkeys(("page_size", "entries", "pages", "bytes", "lookups", "hits"), _COUNT),
            "capacity_bytes": _or_null(_COUNT),
            "hit_rate": _NUMBER,
            "tokens_reused": _COUNT,
            "inserts": _COUNT,
            "evictions": _table(_COUNT),
            "rejects": _table(_COUNT),
            "last_reject": _or_null(_STRING),
        }
    ),
    "CacheReset": _object({"cleared": _TRUTH, "freed_entries": _COUNT, "freed_bytes": _COUNT}),
    "Event": {**_object({"data": _STRING}, {"event": _STRING}), "description": "One event of the stream."},
}

REPLIES: Final[Mapping[tuple[str, str], str]] = {
    ("POST", "/v1/chat/completions"): "ChatReply",
    ("POST", "/chat/completions"): "ChatReply",
    ("POST", "/v1/completions"): "CompletionReply",
    ("POST", "/completion"): "NativeReplies",
    ("POST", "/completions"): "NativeReplies",
    ("POST", "/v1/messages"): "MessageReply",
    ("POST", "/v1/messages/count_tokens"): "TokenCount",
    ("POST", "/tokenize"): "Tokenized",
    ("POST", "/detokenize"): "Detokenized",
    ("POST", "/apply-template"): "Rendered",
    ("GET", "/v1/models"): "Models",
    ("GET", "/models"): "Models",
    ("GET", "/v1/models/{name}"): "Model",
    ("GET", "/props"): "Props",
    ("GET", "/slots"): "Slots",
    ("GET", "/health"): "Health",
    ("GET", "/v1/health"): "Health",
    ("GET", "/version"): "Version",
    ("GET", "/v1/cache/stats"): "CacheStats",
    ("POST", "/v1/cache/reset"): "CacheReset",
}
"""Of each method and path, what its good reply is: a name of SCHEMAS."""
