"""`mlxcel inspect`: what a checkpoint holds and whether it fits (docs/spec/clients.md 1.8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import attrs
import click

from mlxcel.cli.context import CliContext
from mlxcel.cli.options import KindType, SectionCommand, SectionOption, click_option, config_option, model_argument
from mlxcel.option_values import BYTES, whole
from mlxcel.options import BY_NAME
from mlxcel.store.record import format_bytes

if TYPE_CHECKING:
    from mlxcel.inspection import Fit, Inspection, KVBytes, Shapes


_OPTIONS: Final = ("max_model_len", "dtype", "kv_cache_budget", "gpu_memory_utilization", "prefill_chunk")


@click.command(
    "inspect",
    cls=SectionCommand,
    params=[
        model_argument(),
        click_option(BY_NAME["model"]),
        *(click_option(BY_NAME[name]) for name in _OPTIONS),
        SectionOption(
            ("--parallel", "--max-num-seqs"), metavar="N", default=1,
            type=KindType(whole(1, 2**31 - 1, "an integer of 1 or more")),
            help="Rows that are open at once.  [1]", section="Engine",
        ),
        config_option(),
        SectionOption(
            ("--device-memory",), type=KindType(BYTES), metavar=BYTES.metavar,
            help="Answer for a device of so much memory instead of this host.", section="Engine",
        ),
        SectionOption(("--json", "as_json"), is_flag=True, help="One JSON object on stdout.", section="Output"),
    ],
)  # fmt: skip
@click.pass_obj
def command(context: CliContext, /, *, parallel: int, device_memory: int | None, as_json: bool) -> None:
    """What a checkpoint holds, and whether it fits: from its headers, no weight is read and nothing is fetched.

    --dtype is the type to count with, also one that no backend here computes in.
    """
    config = context.config
    from mlxcel.inspect_model import inspect_model

    found, error = inspect_model(
        config, context.plugins(), context.progress(), rows=parallel, device_memory=device_memory
    )
    if as_json:
        click.echo(json.dumps(attrs.asdict(found), indent=2))
    else:
        for name, value in lines(found):
            click.echo(f"{name:13} {value}")
    if error is not None:
        raise error


def lines(found: Inspection) -> Iterator[tuple[str, str]]:
    """The report as names and values, without what is not known."""
    yield "model", found.name
    yield "source", found.source
    yield "path", f"{found.path} ({format_bytes(found.disk_bytes)})"
    if found.format is not None:
        yield "format", ", ".join(filter(None, (found.format, found.quantisation)))
    if found.architecture is not None:
        yield "family", found.family or f"none for {found.architecture}"
    if found.shapes is not None:
        yield from _shape_lines(found.shapes)
    if found.parameters is not None:
        total, active = found.parameters.total, found.parameters.active
        yield "parameters", f"{total:,}" if active == total else f"{total:,}, of which a token meets {active:,}"
    if found.weights is not None:
        yield "on disk", f"{_bytes(found.weights.disk_bytes)} in {found.weights.tensors} tensors"
        for dtype, size in found.weights.device_bytes.items():
            yield f"as {dtype}", _bytes(size)
    if found.unused is not None and found.unused.count:
        unused = found.unused
        more = ", ..." if unused.count > len(unused.names) else ""
        yield "not used", f"{unused.count} tensors, {_bytes(unused.bytes)}: {', '.join(unused.names)}{more}"
    if found.kv is not None and found.fit is not None:
        yield from _kv_lines(found.kv, found.fit)
    if found.memory is not None:
        memory = found.memory
        of = "in all" if memory.kind == "device" else "of what weights and workspace leave, for the KV"
        yield "memory", f"{memory.kind}: {_bytes(memory.total)}, {_bytes(memory.free)} free; {memory.share:.0%} {of}"
    if found.fit is not None:
        yield from _fit_lines(found.fit)
    for reason in found.unsupported:
        yield "unsupported", f"{reason.part}: {reason.reason}"


def _shape_lines(shapes: Shapes) -> Iterator[tuple[str, str]]:
    letters = {"V": shapes.V, "D": shapes.D, "H": shapes.H, "K": shapes.K, "d": shapes.d, "F": shapes.F, "L": shapes.L}
    yield "shapes", ", ".join(f"{letter} {size}" for letter, size in letters.items() if size is not None)
    windows = " and ".join(map(str, shapes.windows))
    kinds = {
        "that see everything": shapes.full_layers,
        f"with a window of {windows}": shapes.window_layers,
        "with recurrent state": shapes.recurrent_layers,
    }
    yield "layers", ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    if shapes.experts is not None:
        chosen = "" if shapes.experts_per_token is None else f", {shapes.experts_per_token} a token"
        yield "experts", f"{shapes.experts} a layer{chosen}"
    yield "context", f"{shapes.context} positions"


def _kv_lines(kv: KVBytes, fit: Fit) -> Iterator[tuple[str, str]]:
    yield "KV a token", f"{_bytes(kv.full_per_token)} as {fit.dtype}"
    if kv.window_per_row:
        yield "  in windows", f"{_bytes(kv.window_per_token)}, at most {_bytes(kv.window_per_row)} a row"
    if kv.state_per_row:
        yield "  as state", f"{_bytes(kv.state_per_row)} a row"
    yield "KV a row", f"{_bytes(kv.row)} at {fit.ctx_size} positions"
    yield "workspace", f"about {_bytes(fit.workspace_bytes)}, for {fit.prefill_chunk} tokens a step"
    if fit.margin_bytes:
        yield "margin", f"{_bytes(fit.margin_bytes)} for the device's runtime"


def _fit_lines(fit: Fit) -> Iterator[tuple[str, str]]:
    yield "KV budget", _bytes(fit.kv_budget_bytes)
    tokens = "any number" if fit.tokens is None else str(fit.tokens)
    yield "tokens", f"{tokens} fit in all, {fit.tokens_per_row} a row at --parallel {fit.parallel}"
    yield "rows", f"{fit.rows_at_full_context} fit at {fit.ctx_size} positions"
    margin = ", margin" if fit.margin_bytes else ""
    yield "needs", f"{_bytes(fit.needed_bytes)} for weights, workspace{margin} and KV"
    answer = "no" if fit.context is None else f"yes, with {fit.context} positions a row"
    yield "fits", answer if fit.reason is None else f"{answer}: {fit.reason}"
    if fit.hint is not None:
        yield "hint", fit.hint


def _bytes(count: int) -> str:
    return f"{count} bytes ({format_bytes(count)})" if count >= 1000 else f"{count} bytes"
