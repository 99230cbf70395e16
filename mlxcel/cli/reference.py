"""The option tables of docs/cli.md, made of the tables that the program itself uses.

`python -m mlxcel.cli.reference docs/cli.md` writes them between their markers; a test compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from mlxcel.cli.options import SAMPLING_FLAGS
from mlxcel.options import OPTIONS

_BLOCK: Final = re.compile(r"(<!-- table: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def engine_table() -> str:
    rows = ["| flag | variable | keyword | default | meaning |", "|---|---|---|---|---|"]
    for option in OPTIONS:
        value = "" if option.switch else f" {option.kind.metavar}"
        flags = f"`{', '.join(option.flags)}{value}`".replace("|", "\\|") if option.flags else "–"
        variable = f"`{option.env}`" if option.env else "–"
        rows.append(f"| {flags} | {variable} | `{option.name}` | {option.default_words} | {option.help} |")
    return "\n".join(rows)


def sampling_table() -> str:
    rows = ["| flag | field | default | meaning |", "|---|---|---|---|"]
    for flag in SAMPLING_FLAGS:
        spelled = f"`{', '.join(flag.flags)} {flag.kind.metavar}`"
        rows.append(f"| {spelled} | `{flag.field}` | {flag.default_words} | {flag.help} |")
    return "\n".join(rows)


TABLES: Final = {"engine": engine_table, "sampling": sampling_table}


def filled(page: str) -> str:
    """The page with its tables as they are now."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
