"""Flags of `mlxcel serve` beside the engine's (docs/spec/clients.md 3.1), and the settings that they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from mlxcel.cli.options import KindType, SectionOption
from mlxcel.errors import UsageError
from mlxcel.option_values import BYTES, FILE, NAME, TEXT, Kind, one_of, real_in, whole

if TYPE_CHECKING:
    from mlxcel.server.settings import ServerSettings

SECTION: Final = "Server"
MAX_KEY_FILE: Final = 1 << 20  # bytes


@attrs.frozen
class ServeFlag:
    """A flag that takes a value. `field` is that of ServerSettings; `default` is what people read."""

    field: str
    flags: tuple[str, ...]
    kind: Kind
    default: str
    help: str
    repeatable: bool = False


def _seconds(low: float, words: str) -> Kind:
    return real_in(low, 1e9, words, "S")


def _origins(text: str) -> tuple[str, ...]:
    found = tuple(origin.strip().rstrip("/") for origin in text.split(",") if origin.strip())
    if not found or not all(origin == "*" or "://" in origin for origin in found):
        raise ValueError(text)
    return found


ORIGINS: Final = Kind("LIST", "origins as https://example.org separated by commas, or *", _origins, _origins)
COUNT: Final = whole(0, 2**31 - 1, "an integer from 0 to 2147483647")
SECONDS: Final = _seconds(0, "a number of seconds from 0 to 1000000000")

FLAGS: Final = (
    ServeFlag("host", ("--host",), NAME, "127.0.0.1", "Address to listen on; PATH.sock: a Unix socket."),
    ServeFlag("port", ("--port",), whole(0, 65535, "an integer from 0 to 65535"), "8080", "Port; 0: a free one."),
    ServeFlag(
        "max_queue_depth", ("--max-queue-depth", "--max-num-queued-reqs"), COUNT, "32",
        "Requests that may wait; one more is refused with 503.",
    ),
    ServeFlag("timeout", ("--timeout", "-to"), SECONDS, "3600", "Time of a request, its wait included; 0: any."),
    ServeFlag(
        "shutdown_timeout", ("--shutdown-timeout",), SECONDS, "30",
        "Time that replies have to end when the server is told to; 0: any.",
    ),
    ServeFlag(
        "api_keys", ("--api-key",), TEXT, "none", "Key that requests must have; repeatable. A file is safer.",
        repeatable=True,
    ),
    ServeFlag("api_key_file", ("--api-key-file",), FILE, "none", "Keys from a file, one a line; # begins a comment."),
    ServeFlag(
        "allowed_origins", ("--allowed-origins", "--cors-origins"), ORIGINS, "this machine's",
        "Origins whose web pages may use the server; *: any.",
    ),
    ServeFlag(
        "cache_isolation", ("--cache-isolation",), one_of("key", "off"), "key",
        "Who shares cached prompts: requests of one API key, or all.",
    ),
    ServeFlag("max_body_size", ("--max-body-size",), BYTES, "8M", "Largest body of a request."),
    ServeFlag(
        "max_prompts", ("--max-prompts",), whole(1, 2**20, "an integer from 1 to 1048576"), "256",
        "Most prompts of a request.",
    ),
    ServeFlag(
        "sse_ping_interval", ("--sse-ping-interval",),
        real_in(-1, 1e9, "a number of seconds from 0 to 1000000000, or -1", "S"), "15",
        "Time without a token until a stream is kept alive; -1: it is not.",
    ),
    ServeFlag("log_format", ("--log-format",), one_of("text", "json"), "text", "Form of the lines on requests."),
)  # fmt: skip

SWITCHES: Final = (
    # field, flags as click has them, default, help
    ("strict", ("--strict",), False, "Refuse fields of requests that would be ignored, and values that cannot act."),
    ("ui", ("--ui/--no-ui",), True, "The chat page at /.  [on]"),
    ("slots", ("--slots/--no-slots",), True, "What each row does, at /slots.  [on]"),
    ("metrics", ("--metrics/--no-metrics",), True, "Numbers for Prometheus at /metrics.  [on]"),
    ("public_metrics", ("--public-metrics",), False, "/metrics without a key."),
    ("allow_request_templates", ("--allow-request-templates",), False, "A chat template of a request's own."),
    ("log_requests", ("--log-requests/--no-log-requests",), True, "A line for each request.  [on]"),
    ("log_prompts", ("--log-prompts",), False, "Prompts and replies in these lines."),
)


def serve_options() -> list[click.Parameter]:
    """Each passes its value under its field's name: None, or nothing in it, where it was not given."""

    def once(ctx: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
        if len(set(values)) > 1:
            raise UsageError(f"{parameter.opts[-1]} is given twice: {values[0]} and {values[1]}", hint="give it once")
        return values[0] if values else None

    valued = [
        SectionOption(
            (flag.field, *flag.flags), type=KindType(flag.kind), metavar=flag.kind.metavar, multiple=True,
            help=f"{flag.help}  [{flag.default}]", section=SECTION,
            **({} if flag.repeatable else {"callback": once}),
        )
        for flag in FLAGS
    ]  # fmt: skip
    switches = [
        SectionOption((field, *flags), default=default, is_flag=True, help=words, section=SECTION)
        for field, flags, default, words in SWITCHES
    ]
    return [*valued, *switches]


def server_settings(given: Mapping[str, Any], sampling: Mapping[str, Any], key_variable: str | None) -> ServerSettings:
    """The settings that the values of `serve_options` make. Keys of flags, of the file and of MLXCEL_API_KEY count
    together. UsageError for a file that cannot be read, and for a key that is none."""
    from mlxcel.server.settings import ServerSettings

    values = {name: value for name, value in given.items() if value is not None and value != ()}
    keys = [*values.pop("api_keys", ()), *_keys_of(values.pop("api_key_file", None))]
    keys += [] if key_variable is None else [key_variable]
    for key in keys:
        if not key.strip() or key != key.strip() or not key.isprintable():
            raise UsageError("an API key is empty, or has blanks or unprintable characters around or in it")
    return ServerSettings(**values, api_keys=tuple(dict.fromkeys(keys)), sampling=dict(sampling))


def _keys_of(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        with open(file, "rb") as stream:
            text = stream.read(MAX_KEY_FILE + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(
            f"the key file {file} cannot be read: {why}", hint="--api-key-file takes a file with one key a line"
        ) from error
    if len(text) > MAX_KEY_FILE:
        raise UsageError(f"the key file {file} has more than {MAX_KEY_FILE} bytes", hint="one key a line")
    lines = (line.strip() for line in text.splitlines())
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise UsageError(f"the key file {file} holds no key", hint="one key a line; # begins a comment")
    return found
