"""`mlxcel serve`: the model behind HTTP (docs/spec/clients.md 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlxcel.cli.context import CliContext
from mlxcel.cli.foreign_flags import ServeCommand
from mlxcel.cli.options import config_option, engine_options, model_argument
from mlxcel.cli.sampling_options import given_fields, sampling_options
from mlxcel.cli.serve_options import FLAGS, SWITCHES, serve_options, server_settings
from mlxcel.cli.streams import tell

if TYPE_CHECKING:
    from socket import socket

    from mlxcel.serve_engine import Serving
    from mlxcel.server.settings import ServerSettings


@click.command(
    "serve",
    cls=ServeCommand,
    params=[
        model_argument(),
        *serve_options(),
        *engine_options("model", "engine"),
        config_option(),
        *[option for option in sampling_options() if option.name != "strict"],
        *engine_options("advanced", "scheduler"),
    ],
)
@click.pass_obj
def command(context: CliContext, /, **given: Any) -> int:
    """Serve a model over HTTP: OpenAI's routes, Anthropic's, llama.cpp's, and a chat page.

    MODEL is a folder, a .gguf file, or a name that `mlxcel list` shows. Sampling flags are the defaults of requests.
    """
    context.scheduler = True
    own = {name: given.pop(name) for name in (*(flag.field for flag in FLAGS), *(field for field, *_ in SWITCHES))}
    from mlxcel.config import api_key_variable

    settings = server_settings(own, given_fields(given), api_key_variable())
    context.plugins()  # whatever options cannot be obeyed is told before an address is taken
    from mlxcel.server.run import listen

    with listen(settings) as sock:
        for warning in settings.warnings:
            tell(f"warning: {warning}")
        serve_on(sock, context, settings)
    return 0


def serve_on(sock: socket, context: CliContext, settings: ServerSettings) -> None:
    """Load behind a socket that listens already, and serve until a signal says otherwise."""
    from mlxcel.serve_engine import serve
    from mlxcel.server.app import create_app
    from mlxcel.server.loading import StoppableProgress
    from mlxcel.server.run import run, url
    from mlxcel.server.settings import serving_config

    config, plugins = serving_config(context.config), context.plugins()
    progress = StoppableProgress(context.progress())
    where = url(settings, sock)

    def load() -> Serving:
        depth = settings.max_queue_depth
        return serve(config, plugins, progress, max_queue_depth=depth, warm=True, say=context.say)

    app = create_app(settings, load, give_up=progress.stop, config=config, write=context.say)

    def draining(requests: int) -> None:
        """A server without a request ends before anybody could read of it."""
        if requests:
            limit = f"for at most {settings.shutdown_timeout:g} s" if settings.shutdown_timeout else "to their ends"
            context.say(f"shutting down: requests={requests} run on {limit}; a second signal ends them at once")

    context.say(f"listening on {where}, loading {config.model}")
    run(
        app,
        sock,
        ready=lambda: tell(ready_line(where, app.state.server.served.serving, progress.seconds)),
        draining=draining,
    )


def ready_line(where: str, serving: Serving, compiled: float) -> str:
    """What serves now, as it is (docs/spec/clients.md 3.1). `compiled` is in seconds."""
    model, engine = serving.model, serving.model.engine
    kv, rows = engine.kv_stats, engine.settings.slots
    tokens = kv.total * kv.page_size
    facts = {
        "model": model.facts.name,
        "backend": model.backend,
        "device": model.caps.device,
        "level": engine.level,
        "rows": rows,
        "pages": kv.total,
        "tokens_fit": tokens,
        "tokens_per_row": min(engine.settings.context, tokens // rows),
        "warmup": f"{compiled + serving.warm_up:.1f}s",
    }
    return " ".join([f"ready {where}", *(f"{name}={value}" for name, value in facts.items())])
