"""The tables of sampling parameters in the specifications, as data: what the code is compared with."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

SPEC = Path(__file__).parent.parent / "docs/spec"
CLIENTS = ("lib", "cli", "srv")
WORDS = {"none": None, "off": None, "false": False, "true": True, "documented order": None}
WAVE_2 = {"response_format", "grammar", "json_schema", "structured_outputs"}


@attrs.frozen
class Row:
    """Of docs/spec/clients.md 0.3: the fields of a line, and what it says of each."""

    fields: tuple[str, ...]
    flags: tuple[str, ...]
    other: tuple[str, ...]
    defaults: tuple[str, ...]


def quoted(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def lines(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head; an escaped bar stays in its cell."""
    text = (SPEC / page).read_text(encoding="utf-8").split(heading, 1)[1]
    table = text[text.index("\n|") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def field_rows() -> list[Row]:
    rows = []
    for fields, flags, other, _, default in lines("clients.md", "### 0.3"):
        names = quoted(fields)
        if set(names) <= WAVE_2:
            continue
        parts = default.split(" / ") if " / " in default else default.split(", ")
        rows.append(Row(names, quoted(flags), quoted(other), tuple(parts)))
    return rows


def value(text: str) -> object:
    text = text.strip().strip("`")
    if text in WORDS:
        return WORDS[text]
    try:
        return float(text.replace("−", "-"))
    except ValueError:
        return text


def defaults() -> dict[str, dict[str, object]]:
    """By field and client, of docs/spec/clients.md 0.3."""
    found: dict[str, dict[str, object]] = {}
    for row in field_rows():
        by_client = len(row.defaults) == 3 and len(row.fields) == 1
        each = row.defaults if len(row.defaults) == len(row.fields) and not by_client else row.defaults[:1]
        for place, field in enumerate(row.fields):
            if by_client and field != "dry_sequence_breakers":
                found[field] = dict(zip(CLIENTS, map(value, row.defaults), strict=True))
            else:
                text = each[place] if len(each) == len(row.fields) else each[0]
                found[field] = dict.fromkeys(CLIENTS, value(text))
    return found
