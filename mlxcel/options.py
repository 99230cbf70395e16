"""The one table of engine options. Flags, variables, keywords, keys of the configuration file and the documentation's
tables all come from it (docs/spec/clients.md 0.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from mlxcel.option_values import (
    CAPACITY,
    DEVICE,
    FILE,
    JSON_OBJECT,
    LOOP_DETECTION,
    LOOP_OFF,
    NAME,
    NAMES,
    ON_OFF,
    SIZE,
    SWITCH,
    TEXT,
    Kind,
    one_of,
    real_in,
    whole,
)

Group = Literal["global", "model", "engine", "advanced", "scheduler", "output"]
"""`scheduler`: of clients that run many rows; one that runs a single row has none of these."""

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
DEVICE_SHARE: Final = 0.9
"""Of a device's memory: what is left serves the driver, loaded programs and whoever else is there."""


@attrs.frozen
class Option:
    """`name` is the keyword and the field of EngineConfig. `flags` come with the preferred one first; a switch has one.

    `default_words` is what people read. `in_file` says whether the configuration file may set it.
    """

    name: str
    flags: tuple[str, ...]
    env: str | None
    kind: Kind
    default: Any
    default_words: str
    help: str
    group: Group
    in_file: bool = True

    @property
    def switch(self) -> bool:
        return self.kind is SWITCH

    @property
    def on_off(self) -> bool:
        """Its flag says yes, `--no-` and the rest of it says no."""
        return self.kind is ON_OFF

    @property
    def repeatable(self) -> bool:
        return self.kind is NAMES

    @property
    def keys(self) -> tuple[str, ...]:
        """Names in the configuration file: the keyword, and every long flag with `_`."""
        long = [flag[2:].replace("-", "_") for flag in self.flags if flag.startswith("--")]
        return tuple(dict.fromkeys([self.name, *long]))


OPTIONS: Final = (
    Option(
        "backend", ("--backend",), "MLXCEL_BACKEND", NAME, None, "the available one of highest priority",
        "Backend that runs the model: reference-numpy, jax-cuda or a plugin's.", "global",
    ),
    Option(
        "device", ("--device",), "MLXCEL_DEVICE", DEVICE, "auto", "auto",
        "Device. One that is named and missing is an error.", "global",
    ),
    Option(
        "deterministic", ("--deterministic",), "MLXCEL_SDPA_DETERMINISTIC", SWITCH, False, "off",
        "The same bits whatever the batch and chunk sizes (at least level R1).", "global",
    ),
    Option(
        "offline", ("--offline",), "MLXCEL_OFFLINE", SWITCH, False, "off", "No network call of any kind.", "global",
    ),
    Option(
        "no_color", ("--no-color",), "NO_COLOR", SWITCH, False, "off",
        "No colours on stderr.", "global", in_file=False,
    ),
    Option(
        "model", ("-m", "--model"), "MLXCEL_MODEL", NAME, DEFAULT_MODEL, DEFAULT_MODEL,
        "A folder, a .gguf file, a name that `mlxcel list` shows, or owner/name of Hugging Face.", "model",
    ),
    Option(
        "max_model_len", ("-c", "--ctx-size", "--max-model-len"), "MLXCEL_CTX_SIZE",
        whole(0, 2**31 - 1, "an integer from 0 to 2147483647"), 0, "0: the model's own, or what the KV budget holds",
        "Positions a sequence may take, prompt and reply together.", "engine",
    ),
    Option(
        "dtype", ("--dtype",), "MLXCEL_DTYPE", one_of("auto", "float32", "bfloat16", "float16"), "auto", "auto",
        "Type of the computation.", "engine",
    ),
    Option(
        "kv_storage", ("--kv-storage", "--decode-storage"), "MLXCEL_SERVER_DECODE_STORAGE", NAME, "auto",
        "auto: dense for one row, paged above", "Where the KV lives: auto, dense, paged or a plugin's.", "engine",
    ),
    Option(
        "kv_cache_budget", ("--kv-cache-budget",), "MLXCEL_KV_CACHE_BUDGET", SIZE, None,
        "auto: what weights, workspace and margin leave of a device's share, or half of what weights and workspace "
        "leave of the host's memory",
        "Memory for the KV, such as 512M or 2G.", "engine",
    ),
    Option(
        "gpu_memory_utilization", ("--gpu-memory-utilization",), "MLXCEL_MEMORY_FRACTION",
        real_in(0, 1, "a number above 0 and at most 1", above=True), DEVICE_SHARE, f"{DEVICE_SHARE:.2f}",
        "Share of a GPU's memory for weights, KV, workspace and margin together.", "engine",
    ),
    Option(
        "prefill_chunk", ("--prefill-chunk", "--prefill-chunk-size"), "MLXCEL_PREFILL_CHUNK",
        whole(1, 2**31 - 1, "an integer from 1 to 2147483647"), 2048, "2048", "Prompt tokens a step.", "engine",
    ),
    Option(
        "prefill_planner", ("--prefill-planner",), None, NAME, "chunked", "chunked",
        "How prompts are cut into pieces: chunked or a plugin's.", "engine",
    ),
    Option(
        "sampler", ("--sampler",), None, NAME, "chain", "chain",
        "How tokens are drawn: chain or a plugin's.", "engine",
    ),
    Option(
        "loop_detection", ("--loop-detection",), "MLXCEL_LOOP_DETECTION", LOOP_DETECTION, LOOP_OFF, "off",
        "End a reply that repeats itself: COUNT equal blocks of MIN to MAX tokens; on: 1,20,12.", "engine",
    ),
    Option(
        "chat_template", ("--chat-template",), None, TEXT, None, "the model's",
        "Chat template, as Jinja text.", "engine",
    ),
    Option(
        "chat_template_file", ("--chat-template-file",), None, FILE, None, "the model's",
        "Chat template, from a file.", "engine",
    ),
    Option(
        "chat_template_kwargs", ("--chat-template-kwargs",), None, JSON_OBJECT, None, "none",
        "More variables for the chat template.", "engine",
    ),
    Option(
        "generation_config", ("--generation-config",), None,
        Kind("auto|eos|none|FILE", "auto, eos, none or the name of a file", FILE.from_text, FILE.from_data),
        "eos", "eos", "What generation_config.json decides: auto (ends, sampling), eos (ends), none.", "engine",
    ),
    Option(
        "served_model_name", ("--served-model-name", "-a", "--alias"), "MLXCEL_ALIAS", NAMES, (),
        "the last part of the model's name", "What the model is called in replies; repeatable.", "engine",
    ),
    Option(
        "max_consecutive_faults", ("--max-consecutive-faults",), "MLXCEL_MAX_CONSECUTIVE_FAULTS",
        whole(1, 1000, "an integer from 1 to 1000"), 8, "8", "Failed steps in a row until the engine gives up.",
        "advanced",
    ),
    Option(
        "debug_numerics", ("--debug-numerics",), "MLXCEL_DEBUG_NUMERICS", SWITCH, False, "off",
        "Name weights that are not finite, and the first layer that was not where a reply fails so; slower.",
        "advanced",
    ),
    Option(
        "no_warmup", ("--no-warmup",), "MLXCEL_NO_WARMUP", SWITCH, False, "warm-up on",
        "Be ready before every program is compiled; the first requests then wait for theirs.", "scheduler",
    ),
    Option(
        "force_sync", (), "MLXCEL_FORCE_SYNC", SWITCH, False, "off",
        "Read each step before the next one is submitted.", "scheduler",
    ),
    Option(
        "max_num_seqs", ("-np", "--parallel", "--max-num-seqs"), "MLXCEL_PARALLEL",
        whole(1, 65536, "an integer from 1 to 65536"), None,
        "4 on a CPU, 32 on a GPU, fewer if the KV budget holds fewer",
        "Rows that are decoded together.", "scheduler",
    ),
    Option(
        "decode_timeout", ("--decode-timeout",), "MLXCEL_DECODE_TIMEOUT",
        real_in(0, 1e9, "a number of seconds from 0 to 1000000000"), 600.0, "600",
        "Seconds without a finished step until the engine counts as hanging; 0: never.", "scheduler",
    ),
    Option(
        "prefill_grant_interval", ("--prefill-grant-interval",), "MLXCEL_PREFILL_GRANT_INTERVAL",
        whole(1, 4096, "an integer from 1 to 4096"), 16, "16",
        "Decode steps between two pieces of prompts, where steps are not mixed.", "scheduler",
    ),
    Option(
        "adaptive_prefill_chunk", ("--adaptive-prefill-chunk",), "MLXCEL_ADAPTIVE_PREFILL_CHUNK", ON_OFF, None,
        "on at level R2, off at R0", "Shorter pieces of prompts while rows decode.", "scheduler",
    ),
    Option(
        "prefill_chunk_busy", ("--prefill-chunk-busy",), "MLXCEL_PREFILL_CHUNK_BUSY",
        whole(1, 2**31 - 1, "an integer from 1 to 2147483647"), 512, "512", "Prompt tokens of these.", "scheduler",
    ),
    Option(
        "mixed_step", ("--mixed-step",), "MLXCEL_MIXED_STEP", ON_OFF, None, "on at level R2, off at R0",
        "Rows that decode and pieces of prompts in one step.", "scheduler",
    ),
    Option(
        "max_batch_prefill_tokens", ("--max-batch-prefill-tokens",), "MLXCEL_MAX_BATCH_PREFILL_TOKENS",
        whole(1, 2**31 - 1, "an integer from 1 to 2147483647"), 4096, "4096",
        "Prompt tokens of all rows a step; the first row is always taken.", "scheduler",
    ),
    Option(
        "no_preemption", ("--no-preemption",), "MLXCEL_NO_PREEMPTION", SWITCH, False, "preemption on",
        "Begin a row only when there is KV for all it may become.", "scheduler",
    ),
    Option(
        "kv_admission_watermark", ("--kv-admission-watermark",), "MLXCEL_KV_ADMISSION_WATERMARK",
        real_in(0, 0.5, "a number from 0 to 0.5"), 0.01, "0.01",
        "Share of the KV pages that rows which run keep for their growth.", "scheduler",
    ),
    Option(
        "priority_ageing_seconds", ("--priority-ageing-seconds",), "MLXCEL_PRIORITY_AGEING_SECONDS",
        real_in(0, 1e9, "a number of seconds from 0 to 1000000000"), 10.0, "10",
        "Seconds that a lane lets a request come later than the lane before; 0: no lanes.", "scheduler",
    ),
    Option(
        "page_size", ("--page-size", "--block-size"), "MLXCEL_PAGE_SIZE",
        whole(1, 128, "an integer from 1 to 128"), None, "the backend's choice",
        "Positions a page of the KV holds, a size that the backend offers.", "scheduler",
    ),
    Option(
        "enable_prefix_caching", ("--prompt-cache",), "MLXCEL_PROMPT_CACHE_ENABLED", ON_OFF, None, "on",
        "Keep the KV of prompts for those that begin alike.", "scheduler",
    ),
    Option(
        "prompt_cache_capacity_bytes", ("--prompt-cache-capacity-bytes",), "MLXCEL_PROMPT_CACHE_CAPACITY_BYTES",
        CAPACITY, None, "auto: what nobody else needs", "Most memory of kept prompts; 0: none is kept.", "scheduler",
    ),
    Option(
        "prompt_cache_max_entries", ("--prompt-cache-max-entries",), "MLXCEL_PROMPT_CACHE_MAX_ENTRIES",
        whole(0, 2**31 - 1, "an integer from 0 to 2147483647"), 0, "0: bytes decide", "Most kept prompts.", "scheduler",
    ),
    Option(
        "prompt_cache_ttl", ("--prompt-cache-ttl",), "MLXCEL_PROMPT_CACHE_TTL",
        real_in(0, 1e9, "a number of seconds from 0 to 1000000000"), 3600.0, "3600",
        "Seconds that a prompt is kept after its last use; 0: no limit.", "scheduler",
    ),
    Option(
        "prompt_cache_min_prefix", ("--prompt-cache-min-prefix",), "MLXCEL_PROMPT_CACHE_MIN_PREFIX",
        whole(1, 2**31 - 1, "an integer from 1 to 2147483647"), 16, "16",
        "Fewest tokens worth keeping and taking up.", "scheduler",
    ),
    Option(
        "prompt_cache_file", ("--prompt-cache-file",), "MLXCEL_PROMPT_CACHE_FILE", FILE, None, "none",
        "File that kept prompts are read from at the start and written to at the end.", "scheduler",
    ),
    Option(
        "max_n", ("--max-n",), "MLXCEL_MAX_N", whole(1, 65536, "an integer from 1 to 65536"), 16, "16",
        "Most replies that one prompt may ask for.", "scheduler",
    ),
    Option(
        "max_logprobs", ("--max-logprobs",), "MLXCEL_MAX_LOGPROBS",
        whole(-1, 2**31 - 1, "an integer from 0 to 2147483647, or -1"), 20, "20",
        "Most log-probabilities a position; -1: of the whole vocabulary.", "scheduler",
    ),
    Option(
        "print_token_ids", ("--print-token-ids",), "MLXCEL_PRINT_TOKEN_IDS", SWITCH, False, "off",
        "Token ids of the reply on stderr.", "output", in_file=False,
    ),
    Option(
        "trace_hooks", (), "MLXCEL_TRACE_HOOKS", SWITCH, False, "off", "Print every call of a plugin hook.",
        "global", in_file=False,
    ),
    Option(
        "plugins", (), "MLXCEL_PLUGINS", TEXT, None, "all that are installed",
        "Distributions whose plugins load, separated by commas; empty: built-ins only.", "global", in_file=False,
    ),
)  # fmt: skip

BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS}
