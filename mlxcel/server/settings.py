"""What the operator of a server chose beside the engine's options (docs/spec/clients.md 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from mlxcel.config import EngineConfig

Isolation = Literal["key", "off"]
LogFormat = Literal["text", "json"]

MAX_BODY: Final = 8 << 20
"""Bytes."""


@attrs.frozen(kw_only=True)
class ServerSettings:
    """Times are in seconds. A `host` that ends in `.sock` is the path of a Unix socket; `port` 0 picks a free one.

    `timeout` 0: requests may take any time; `shutdown_timeout` 0: a shutdown waits for them as long. `allowed_origins`
    None: those of this machine; `("*",)`: any. `sse_ping_interval` below 0: no keep-alive. `sampling` are the defaults
    of requests, by field of SamplingParams. `max_prompts` is the most prompts of a request.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_queue_depth: int = 32
    timeout: float = 3600.0
    shutdown_timeout: float = 30.0
    api_keys: tuple[str, ...] = attrs.field(default=(), repr=False)
    allowed_origins: tuple[str, ...] | None = None
    cache_isolation: Isolation = "key"
    strict: bool = False
    max_body_size: int = MAX_BODY
    max_prompts: int = 256
    sse_ping_interval: float = 15.0
    ui: bool = True
    slots: bool = True
    metrics: bool = True
    public_metrics: bool = False
    allow_request_templates: bool = False
    log_format: LogFormat = "text"
    log_requests: bool = True
    log_prompts: bool = False
    sampling: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def unix(self) -> bool:
        return self.host.endswith(".sock")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.unix or self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def any_origin(self) -> bool:
        return self.allowed_origins is not None and "*" in self.allowed_origins

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator may not have meant, for the start (docs/spec/clients.md 3.7)."""
        found = []
        if not self.loopback and not self.api_keys:
            found.append(f"--host {self.host} lets other machines in, and there is no --api-key: anybody may ask")
        if self.any_origin and self.api_keys:
            found.append("--allowed-origins '*' lets every web page use a key that its visitor typed in")
        return tuple(found)


def serving_config(config: EngineConfig) -> EngineConfig:
    """Engine options as a server has them: what generation_config.json says of sampling counts unless somebody said
    otherwise (docs/spec/clients.md 0.1)."""
    if config.origins["generation_config"] == "default":
        return attrs.evolve(config, generation_config="auto")
    return config
