"""What a load is made of (docs/spec/clients.md 8.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from mlxcel.remote_http import Address

METRICS: Final = ("ttft", "tpot", "itl", "e2el")

ROUTES: Final[Mapping[str, str]] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Endpoint types, and where each is unless --endpoint says otherwise."""

SECRET: Final = 6
"""Characters from which on a key or a header's value may be a secret. A shorter one would be found in other words."""


@attrs.frozen
class RandomSizes:
    """Tokens of random prompts and replies. Lengths are drawn from `1 - range_ratio` to `1 + range_ratio` times theirs;
    `prefix_len` tokens, the same for all, stand before each prompt."""

    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0


@attrs.frozen
class LoadOptions:
    """`dataset` None: random prompts. `goodput` is in milliseconds by metric, `timeout` in seconds, `percentiles` are
    from 0 to 100. `headers` and the key of `address` are in nothing that is written."""

    address: Address
    endpoint_type: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    headers: tuple[tuple[str, str], ...] = attrs.field(default=(), repr=False)
    num_prompts: int = 100
    dataset: Path | None = None
    sizes: RandomSizes = attrs.field(factory=RandomSizes)
    tokenizer: Path | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 1
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float | None = None
    extra_body: Mapping[str, Any] = attrs.field(factory=dict)
    percentile_metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    goodput: Mapping[str, float] = attrs.field(factory=dict)
    timeout: float = 600.0
    seed: int = 0
    label: str | None = None

    @property
    def chat(self) -> bool:
        return self.endpoint_type == "openai-chat"

    @property
    def route(self) -> str:
        return self.endpoint or ROUTES[self.endpoint_type]

    def without_secrets(self, text: str) -> str:
        """A text of the server's, which may quote what it was sent, in whole or in part."""
        parts = [self.address.key or "", *(part for _, value in self.headers for part in (value, *value.split()))]
        for secret in sorted((part for part in parts if len(part) >= SECRET), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text
