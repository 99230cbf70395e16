"""One process that serves: a socket first, then a model behind it, then signals (docs/spec/clients.md 3.1, 3.11)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import hypercorn.asyncio
import hypercorn.config
from starlette.applications import Starlette

from mlxcel.errors import MlxcelError, UsageError
from mlxcel.server.body_limit import HEADERS
from mlxcel.server.bridge import LOOK
from mlxcel.server.settings import ServerSettings
from mlxcel.server.state import ServerState

log = logging.getLogger("mlxcel.server")

BACKLOG: Final = 512
HTTP_LOG: Final = "mlxcel.server.http"
KEEP_ALIVE: Final = 5.0
"""Seconds without a request until a connection is closed. hypercorn holds one that its client closed as long, too."""

STALLED: Final = 120.0
"""Seconds for which a client may take nothing of what is sent to it, or answer nothing at all."""

AGAIN: Final = 0.1
"""Seconds from one cancellation of what does not end to the next."""

CLOSING: Final = 3.0
"""Seconds that connections get to close once every reply is out."""


class AddressError(MlxcelError):
    """A host and port that cannot be listened on."""

    code = "address"


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens on `host` and `port`: from now on both are this server's. AddressError, UsageError."""
    if settings.unix:
        return _listen_unix(settings.host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"--host {settings.host!r} is no address of this machine: {error}", hint="0.0.0.0 stands for all of them"
        ) from None
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _give_up_the_silent(made)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise AddressError(
            f"{settings.host}:{settings.port} cannot be listened on: {error.strerror}",
            hint="choose another --port, 0 for a free one; what listens there now: `ss -ltnp`",
        ) from error
    return made


def _give_up_the_silent(sock: socket.socket) -> None:
    """Connections have the options of the socket that they come from. Without these one whose machine is gone is never
    missed, and one that reads nothing is kept for ever."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", STALLED / 2), ("TCP_USER_TIMEOUT", STALLED * 1000)):
        if (option := getattr(socket, name, None)) is not None:  # of Linux
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(value)))


def _listen_unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) and made.connect_ex(path) != 0:
            os.unlink(path)  # nobody listens there any more
            made.close()
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(path)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise AddressError(
            f"{path} cannot be listened on: {error.strerror or error}", hint="choose another --host"
        ) from error
    return made


def url(settings: ServerSettings, sock: socket.socket) -> str:
    """Where the server is, with the port that it really has."""
    if settings.unix:
        return f"unix:{settings.host}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: Starlette,
    sock: socket.socket,
    *,
    ready: Callable[[], None],
    draining: Callable[[int], None] = lambda requests: None,
) -> None:
    """Serve on a socket that listens, until a signal came and what ran has ended. `ready` is called once requests are
    answered. The first SIGTERM or SIGINT drains, and `draining` hears how many requests it waits for; a second one ends
    the process at once. Raises what the model could not be loaded for, or what its engine died of.
    """
    state: ServerState = app.state.server
    asyncio.run(_serve(app, state, sock, ready, draining))
    if state.failure is not None:
        raise state.failure


async def _serve(
    app: Starlette,
    state: ServerState,
    sock: socket.socket,
    ready: Callable[[], None],
    draining: Callable[[int], None],
) -> None:
    signalled, cut = asyncio.Event(), False
    loop = asyncio.get_running_loop()

    def cut_off() -> None:
        """hypercorn waits for clients that read nothing: it is left, and what it says of that is of no use. While it
        still gives them time, it takes a cancellation for the end of that, and waits on: then it gets another."""
        nonlocal cut
        cut = True
        logging.getLogger(HTTP_LOG).disabled = True
        loop.set_exception_handler(lambda loop, context: None)
        if serving.cancel():
            loop.call_later(AGAIN, cut_off)

    loop.set_exception_handler(_unless_a_client_is_gone)
    with _signals(signalled):
        announcing = asyncio.create_task(_announce(state, ready))
        serving = asyncio.create_task(
            hypercorn.asyncio.serve(
                app,  # type: ignore[arg-type]
                _config(sock),
                shutdown_trigger=lambda: _end(
                    state, signalled, draining, lambda: loop.call_later(2 * CLOSING, cut_off)
                ),
                mode="asgi",
            )
        )
        try:
            await serving
        except (asyncio.CancelledError, Exception):
            if not cut:
                raise
            log.warning("connections that nobody reads were left behind")
            await app.state.model.stop()
            await _cancel_others()
        finally:
            announcing.cancel()


def _unless_a_client_is_gone(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """hypercorn lets through some of what the system says of a connection that broke, and asyncio of Python 3.11 that a
    connection's task was cancelled."""
    if isinstance(context.get("exception"), (OSError, asyncio.CancelledError)):
        log.debug("a connection broke: %r", context["exception"])
    else:
        loop.default_exception_handler(context)


async def _cancel_others() -> None:
    """Tasks of hypercorn's that wait for a client catch a cancellation, and then wait for it once more."""
    while left := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=AGAIN)


async def _announce(state: ServerState, ready: Callable[[], None]) -> None:
    await state.settled.wait()
    if state.phase == "ready":
        ready()


async def _end(
    state: ServerState, signalled: asyncio.Event, draining: Callable[[int], None], last: Callable[[], object]
) -> None:
    """Wait for the reason to end, then for what still runs. `last` is called when connections should close by
    themselves."""
    reasons = [asyncio.create_task(signalled.wait()), asyncio.create_task(state.over.wait())]
    await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
    for task in reasons:
        task.cancel()
    if signalled.is_set():
        draining(state.requests.replying)
        await _drain(state)
    last()


async def _drain(state: ServerState) -> None:
    """Let what runs go on for `--shutdown-timeout`, then have it cancelled: its clients hear of that (spec C60). Those
    that are slower than their rows may read on for as long."""
    state.drain()
    limit = state.settings.shutdown_timeout
    end = state.clock() + limit if limit else math.inf
    if state.served is not None:
        scheduler = state.served.serving.scheduler
        scheduler.drain(limit)
        await asyncio.to_thread(scheduler.join, None)
        while state.requests.replying and state.clock() < end:
            await asyncio.sleep(LOOK)
    await state.requests.all_answered(CLOSING)


def _config(sock: socket.socket) -> hypercorn.config.Config:
    config = hypercorn.config.Config()
    config.bind = [f"fd://{sock.detach()}"]
    config.backlog = BACKLOG
    config.errorlog = logging.getLogger(HTTP_LOG)
    config.accesslog = None
    config.include_server_header = False
    config.h11_max_incomplete_size = HEADERS
    config.h2_max_header_list_size = HEADERS
    config.keep_alive_timeout = KEEP_ALIVE
    config.graceful_timeout = CLOSING
    return config


@contextmanager
def _signals(signalled: asyncio.Event) -> Iterator[None]:
    """The first signal sets the event, the second ends the process. One that a parent has ignored stays so, and outside
    the main thread none is heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    numbers = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def heard(number: int) -> None:
        if signalled.is_set():
            os._exit(128 + number)
        signalled.set()

    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
