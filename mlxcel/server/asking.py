"""From the body of a generating request to what the scheduler takes: the same for every route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request

from mlxcel.core.request import LANES
from mlxcel.core.request_names import OUR_NAME
from mlxcel.errors import ContextTooLong, EmptyPrompt, RequestError, UnsupportedField, shown

if TYPE_CHECKING:
    from mlxcel.asked import AskedPrompt
    from mlxcel.conversation import Conversation
    from mlxcel.gather import Prepared
    from mlxcel.server.fields import Asking
    from mlxcel.server.record import RequestRecord
    from mlxcel.server.served import ServedModel
    from mlxcel.server.settings import ServerSettings

MOST_ROWS: Final = 1024
"""Prompts times choices of one request."""

PRIORITY: Final = "X-Priority"

LEAST_PING: Final = 0.01
"""Seconds: below, keeping one stream alive would be work that others wait for."""

Prompts = Callable[[], "Sequence[AskedPrompt | Conversation]"]


async def ask(
    request: Request,
    body: Asking,
    served: ServedModel,
    prompts: Prompts,
    *,
    name: str,
    echo: bool = False,
    progress: bool = False,
) -> list[Prepared]:
    """One request a prompt, checked, in the order of `prompts`. `name` is the field that these are in.

    RequestError, whose field is the path that the client wrote. The work is done off the event loop.
    """
    record: RequestRecord = request.state.record
    lane = lane_of(body.priority, request.headers.get(PRIORITY))
    ping = body.sse_ping_interval or 0
    if 0 < ping < LEAST_PING:
        raise RequestError(
            f"sse_ping_interval is {ping}, it must be at least {LEAST_PING}, or 0 or -1 for off",
            field="sse_ping_interval",
        )

    def prepare() -> list[Prepared]:
        resolved = served.resolve(body.sampling)
        asked = prompts()
        count, n = len(asked), resolved.params.n
        if n <= served.caps.max_n and count * n > MOST_ROWS:
            raise RequestError(
                f"{count} prompts with n {n} are {count * n} choices, at most {MOST_ROWS} are taken", field=name
            )
        prepared = []
        for place, (prompt, engine_id) in enumerate(zip(asked, record.engine_ids(count), strict=True)):
            try:
                made = served.prepare(
                    prompt,
                    resolved,
                    request_id=engine_id,
                    isolation=record.isolation,
                    salt=body.cache_salt,
                    lane=lane,
                    use_cache=body.cache_prompt,
                    echo=echo,
                    progress=progress,
                )
            except RequestError as error:
                raise _of_prompt(error, name, place if count > 1 else None) from None
            prepared.append(made)
        return prepared

    try:
        return await asyncio.to_thread(prepare)
    except RequestError as error:
        raise as_written(error, body.sampling) from None


def ping_of(body: Asking, settings: ServerSettings) -> float:
    """Seconds between two comments of a silent stream: the request's own, else the operator's."""
    return settings.sse_ping_interval if body.sse_ping_interval is None else body.sse_ping_interval


def lane_of(priority: str | int | None, header: str | None) -> int:
    """By the field `priority` and the header, which must say the same where both are given. RequestError."""
    lanes = {**LANES, **{str(lane): lane for lane in LANES.values()}}
    said = None if header is None else lanes.get(header.strip().lower())
    if header is not None and said is None:
        raise RequestError(f"{PRIORITY} is {shown(header)}, it must be high, normal, low, 0, 1 or 2", field=PRIORITY)
    if priority is None:
        return LANES["normal"] if said is None else said
    lane = lanes[str(priority)]
    if said is not None and said != lane:
        raise RequestError(
            f"priority is {shown(priority)} and the header {PRIORITY} {shown(header)}",
            field="priority",
            hint="give one of them",
        )
    return lane


def as_written(error: RequestError, given: Mapping[str, Any]) -> RequestError:
    """With the name that the client used for the field, where it is another one than ours."""
    if error.field is not None:
        ours = error.field.split("[")[0].split(".")[0]
        theirs = next((name for name in given if OUR_NAME.get(name) == ours and given[name] is not None), ours)
        error.field = theirs + error.field.removeprefix(ours)
    return error


def template_of(body_template: str | None, allowed: bool) -> str | None:
    """A request's own chat template. UnsupportedField unless the operator allows such."""
    if body_template is not None and not allowed:
        raise UnsupportedField(
            "chat_template is not taken from requests here",
            field="chat_template",
            hint="start the server with --allow-request-templates, or leave it out",
        )
    return body_template


def _of_prompt(error: RequestError, name: str, place: int | None) -> RequestError:
    """With the path of the prompt for its field, if it is about that."""
    if error.field is None and isinstance(error, ContextTooLong | EmptyPrompt):
        error.field = name
    if place is not None and error.field is not None and error.field.split("[")[0] == name:
        error.field = f"{name}[{place}]{error.field.removeprefix(name)}"
        error.args = (f"{error.field}: {error.message}",)
    return error
