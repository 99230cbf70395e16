"""The tables of docs/cli.md and docs/sampling.md, made of the tables that the program itself uses.

`python -m mlxcel.cli.reference PAGE...` writes them between their markers; a test compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from mlxcel.cli.foreign_flags import FOREIGN
from mlxcel.cli.sampling_options import SAMPLING_FLAGS, value_words
from mlxcel.cli.serve_options import FLAGS as SERVE_FLAGS
from mlxcel.cli.serve_options import SWITCHES
from mlxcel.core.param_table import CLIENTS, FIELDS
from mlxcel.core.params import SamplingParams
from mlxcel.core.request_names import REFUSED
from mlxcel.options import OPTIONS

_BLOCK: Final = re.compile(r"(<!-- table: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def engine_table() -> str:
    rows = ["| flag | variable | keyword | default | meaning |", "|---|---|---|---|---|"]
    for option in OPTIONS:
        value = f" {option.kind.metavar}" if option.kind.metavar else ""
        names = [f"{flag}/--no-{flag[2:]}" if option.on_off else flag for flag in option.flags]
        flags = f"`{', '.join(names)}{value}`".replace("|", "\\|") if names else "–"
        variable = f"`{option.env}`" if option.env else "–"
        rows.append(f"| {flags} | {variable} | `{option.name}` | {option.default_words} | {option.help} |")
    return "\n".join(rows)


def sampling_table() -> str:
    rows = ["| flag | field | default | meaning |", "|---|---|---|---|"]
    for flag in SAMPLING_FLAGS:
        value = "" if flag.switch else f" {flag.kind.metavar}"
        spelled = f"`{', '.join(flag.flags)}{value}`".replace("|", "\\|")
        rows.append(f"| {spelled} | `{flag.field}` | {_escaped(flag.default_words)} | {flag.help} |")
    return "\n".join(rows)


def fields_table() -> str:
    """Every sampling parameter: its names, its range, and the defaults of the library, the command line, a server."""
    rows = ["| field | other names in requests | flag | value | default: lib / cli / srv |", "|---|---|---|---|---|"]
    for field in FIELDS:
        flags = ", ".join(f"`{flag.flags[0]}`" for flag in SAMPLING_FLAGS if flag.field == field.name)
        flags = flags or OTHER_FLAGS.get(field.name, "–")
        other = ", ".join(f"`{name}`" for name in field.other) or "–"
        lib = getattr(SamplingParams(), field.name)
        defaults = [value_words(field.clients.get(client, lib)) for client in CLIENTS]
        shown = " / ".join(defaults) if len(set(defaults)) > 1 else defaults[0]
        rows.append(f"| `{field.name}` | {other} | {flags} | {field.rule.words} | {_escaped(shown)} |")
    return "\n".join(rows)


def refused_table() -> str:
    rows = ["| field of a request | why it is refused |", "|---|---|"]
    rows += [f"| `{name}` | {reason} |" for name, (reason, _) in REFUSED.items()]
    return "\n".join(rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


OTHER_FLAGS: Final = {
    "skip_special_tokens": "`--special`, `--no-special`",
    "add_special_tokens": "`--add-special`, `--no-add-special`",
    "loop_detection": "`--loop-detection`",
}


def serve_table() -> str:
    """Flags of `mlxcel serve` beside those of the engine and of sampling."""
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for flag in SERVE_FLAGS:
        spelled = f"`{', '.join(flag.flags)} {flag.kind.metavar}`".replace("|", "\\|")
        rows.append(f"| {spelled} | {flag.default} | {flag.help} |")
    for _, flags, default, words in SWITCHES:
        rows.append(f"| `{flags[0]}` | {'on' if default else 'off'} | {words.removesuffix('  [on]')} |")
    return "\n".join(rows)


def foreign_table() -> str:
    rows = ["| of | flags | instead |", "|---|---|---|"]
    for foreign in FOREIGN:
        flags = ", ".join(f"`{flag}`" for flag in foreign.flags)
        rows.append(f"| {foreign.program} | {flags} | {foreign.hint} |")
    return "\n".join(rows)


TABLES: Final = {
    "engine": engine_table,
    "sampling": sampling_table,
    "fields": fields_table,
    "refused": refused_table,
    "serve": serve_table,
    "foreign": foreign_table,
}


def filled(page: str) -> str:
    """The page with its tables as they are now."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
