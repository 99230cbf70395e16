"""Damage to checkpoint files, drawn from a counter: case n is the same damage on every machine and in every run.

Half of the damage knows the formats, so that it comes past their first checks: numbers that say how much follows are
set to extremes, keys and names occur twice, values change their type, structures nest without end, offsets change
places. The other half is blind: flipped bits, lost ends, slices copied to elsewhere.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import groupby
from random import Random
from typing import Any, Final, NamedTuple

WORDS: Final = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "gemma3_text", "granite", "lfm2", "mixtral"),
    *(
        "default",
        "linear",
        "dynamic",
        "yarn",
        "longrope",
        "llama3",
        "silu",
        "gelu",
        "relu",
        "rope_type",
        "full_attention",
    ),
    *("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Metaspace", "ByteFallback", "Sequence", "Replace"),
    *(
        "<|bos|>",
        "<unk>",
        "<0x41>",
        "▁",
        "Ġ",
        "a b",
        " ",
        "gpt2",
        "t5",
        "bert",
        "gpt-2",
        "F32",
        "F64",
        "U32",
        "F8_E4M3",
    ),
)
JINJA: Final = (
    "{{",
    "}}",
    "{%",
    "%}",
    "{% for a in b %}",
    "{% endfor %}",
    "{{ a.b.c }}",
    "{{ 2 ** 99 }}",
    "{#",
    "|tojson",
)
LEAVES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1e-320, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "\x00", "\ud800", "é", "\U0001f600", "x" * 3000, "../x", [], {}, [[]], {"": {}}, [None] * 9, [0] * 99),
)
RAW: Final = ("1" * 5000, "[" * 3000, '{"a":' * 3000, "[" * 900 + "]" * 900, "1e999", "-", "nul", '"\\ud800"', "\x00")
"""JSON texts that `json.dumps` would not write."""

EXTREMES: Final = (
    0,
    1,
    2,
    3,
    31,
    255,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**60,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
FLOATS: Final = (0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x7F7FFFFF, 0x3F800000)
NOT_UTF8: Final = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\x00")


# --- blind -----------------------------------------------------------------------------------------------------------


def place(draw: Random, data: bytes) -> int:
    """Anywhere, the beginning more often: headers are there."""
    return draw.randrange(1 + (min(len(data), 64) if draw.random() < 0.3 else len(data)))


def flip_bits(draw: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        changed[min(place(draw, data), len(data) - 1)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(draw: Random, data: bytes) -> bytes:
    return data[: place(draw, data)]


def splice(draw: Random, data: bytes) -> bytes:
    """A slice of the file over, or into, another place."""
    start, at = draw.randrange(len(data)), place(draw, data)
    piece = data[start : start + draw.choice((1, 8, 64, 1000))]
    return data[:at] + piece + data[at + (len(piece) if draw.random() < 0.5 else 0) :]


def remove(draw: Random, data: bytes) -> bytes:
    at = place(draw, data)
    return data[:at] + data[at + draw.choice((1, 4, 8, 100)) :]


def put_number(draw: Random, data: bytes) -> bytes:
    at, width = place(draw, data), draw.choice((1, 4, 8))
    return data[:at] + (draw.choice(EXTREMES) % 256**width).to_bytes(width, "little") + data[at + width :]


def break_utf8(draw: Random, data: bytes) -> bytes:
    at = place(draw, data)
    return data[:at] + draw.choice(NOT_UTF8) + data[at:]


def pad(draw: Random, data: bytes) -> bytes:
    return data + draw.choice((b"\0", b" ", b"\xff")) * draw.choice((1, 31, 4096))


BLIND: Final = (flip_bits, flip_bits, truncate, splice, remove, put_number, break_utf8, pad)


def blindly(draw: Random, data: bytes) -> bytes:
    return draw.choice(BLIND)(draw, data) if data else b"\0"


# --- text and JSON ---------------------------------------------------------------------------------------------------


def text(draw: Random, data: bytes) -> bytes:
    """A piece of a template, or one that looks like it."""
    at = place(draw, data)
    return data[:at] + draw.choice((*JINJA, *WORDS)).encode() * draw.choice((1, 1, 2, 500)) + data[at:]


def leaf(draw: Random) -> Any:
    return draw.choice(WORDS) if draw.random() < 0.4 else deepcopy(draw.choice(LEAVES))


def json_tree(draw: Random, data: bytes) -> bytes:
    """One to three changes somewhere in the tree. The tree is the seed's own, so it is valid before."""
    holder = [json.loads(data)]
    for _ in range(draw.choice((1, 1, 2, 3))):
        change_node(draw, holder)
    written = json.dumps(holder[0])
    if draw.random() < 0.15:
        at = draw.choice([match.end() for match in re.finditer("[:,[] ?", written)] or [0])
        written = written[:at] + draw.choice(RAW) + written[at:]
    if draw.random() < 0.1:  # a key twice
        keys = list(re.finditer(r'"[^"\\]*": ', written))
        if keys:
            at = draw.choice(keys)
            written = f"{written[: at.start()]}{at[0]}{json.dumps(leaf(draw))}, {written[at.start() :]}"
    return written.encode("utf-8", "surrogatepass")


def change_node(draw: Random, holder: list[Any]) -> None:
    parent, key = descend(draw, holder)
    kind = draw.randrange(7)
    if kind <= 2:
        parent[key] = leaf(draw)
    elif kind == 3 and parent is not holder:
        del parent[key]
    elif kind == 4:
        parent[key] = [parent[key]] if draw.random() < 0.5 else {draw.choice(WORDS): parent[key]}
    elif kind == 5:
        other = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif isinstance(parent, dict):
        parent[draw.choice((*WORDS, *parent))] = leaf(draw) if draw.random() < 0.5 else deepcopy(parent[key])
    else:
        parent.insert(draw.randrange(len(parent) + 1), leaf(draw) if parent is holder else deepcopy(parent[key]))


def descend(draw: Random, holder: list[Any]) -> tuple[Any, Any]:
    """A container and a key of it."""
    parent: Any = holder
    key: Any = 0
    while isinstance(parent[key], dict | list) and parent[key] and (parent is holder or draw.random() < 0.8):
        parent = parent[key]
        key = draw.choice(list(parent)) if isinstance(parent, dict) else draw.randrange(len(parent))
    return parent, key


# --- safetensors -----------------------------------------------------------------------------------------------------


def shard_header(draw: Random, data: bytes) -> bytes:
    """The JSON header changed as a tree, its length right or not, the data as they were or not."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    if draw.random() < 0.25:
        entries = list(json.loads(header).items())
        (_, first), (_, second) = draw.choice(entries[1:]), draw.choice(entries[1:])
        field = draw.choice(("data_offsets", "shape", "dtype"))
        first[field], second[field] = second[field], first[field]
        header = json.dumps(dict(entries)).encode()
    elif draw.random() < 0.9:
        header = json_tree(draw, header)
    size = len(header) if draw.random() < 0.9 else draw.choice((*EXTREMES, len(header) + 1, len(header) - 1))
    return size.to_bytes(8, "little") + header + (body if draw.random() < 0.9 else blindly(draw, body))


# --- GGUF ------------------------------------------------------------------------------------------------------------


class Atom(NamedTuple):
    """A field of a GGUF file. `owner` numbers metadata pairs and tensor rows; 0 is the preamble, -1 the data."""

    role: str  # "magic", "count", "length", "type", "text", "value", "dim", "offset", "data"
    owner: int
    data: bytes


WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY, ALIGNMENT = 8, 9, 32


def gguf_atoms(data: bytes) -> list[Atom]:
    """A valid file in its fields, in order."""
    atoms: list[Atom] = []
    at, owner = 0, 0

    def take(role: str, size: int) -> int:
        nonlocal at
        atoms.append(Atom(role, owner, data[at : at + size]))
        at += size
        return int.from_bytes(atoms[-1].data, "little") if size <= 8 else 0

    def value(kind: int) -> None:
        if kind == STRING:
            take("text", take("length", 8))
        elif kind == ARRAY:
            inner = take("type", 4)
            for _ in range(take("count", 8)):
                value(inner)
        else:
            take("value", WIDTHS[kind])

    take("magic", 4), take("value", 4)
    rows, pairs = take("count", 8), take("count", 8)
    for owner in range(1, pairs + 1):  # noqa: B007 - `take` reads it
        value(STRING)
        value(take("type", 4))
    for owner in range(pairs + 1, pairs + rows + 1):  # noqa: B007
        value(STRING)
        for _ in range(take("count", 4)):
            take("dim", 8)
        take("type", 4), take("offset", 8)
    owner, at = -1, -(-at // ALIGNMENT) * ALIGNMENT
    take("data", len(data) - at)
    return atoms


def gguf_bytes(atoms: Sequence[Atom]) -> bytes:
    """The file again, data on their alignment."""
    head = b"".join(atom.data for atom in atoms if atom.owner >= 0)
    return head + bytes(-len(head) % ALIGNMENT) + b"".join(atom.data for atom in atoms if atom.owner < 0)


def gguf_fields(draw: Random, atoms: Sequence[Atom]) -> bytes:
    """One or two changes to a file that is given in its fields."""
    changed = list(atoms)
    for _ in range(draw.choice((1, 1, 2))):
        changed = draw.choice(GGUF_CHANGES)(draw, changed)
    return gguf_bytes(changed)


def pick(draw: Random, atoms: Sequence[Atom], *roles: str) -> int:
    """A field of these roles, each pair and row as likely as any other: arrays have thousands of fields."""
    places = [index for index, atom in enumerate(atoms) if atom.role in roles]
    groups = [list(group) for _, group in groupby(places, lambda index: atoms[index].owner)]
    return draw.choice(draw.choice(groups)) if groups else 0


def extreme(draw: Random, atoms: list[Atom]) -> list[Atom]:
    at = pick(draw, atoms, "count", "length", "type", "value", "dim", "offset")
    old = atoms[at]
    own = int.from_bytes(old.data, "little")
    numbers = (*EXTREMES, *FLOATS, own + 1, max(own - 1, 0), 2 * own, own ^ 0x80)
    number = draw.randrange(40) if old.role == "type" else draw.choice(numbers)
    atoms[at] = old._replace(data=(number % 256 ** len(old.data)).to_bytes(len(old.data), "little"))
    return atoms


def other_text(draw: Random, atoms: list[Atom]) -> list[Atom]:
    at = pick(draw, atoms, "text")
    other = atoms[pick(draw, atoms, "text")].data
    own = atoms[at].data
    new = draw.choice((other, b"", own + b"\0", draw.choice(WORDS).encode(), blindly(draw, own), text(draw, own)))
    atoms[at] = atoms[at]._replace(data=new)
    if draw.random() < 0.9:
        atoms[at - 1] = atoms[at - 1]._replace(data=struct.pack("<Q", len(new)))
    return atoms


def retype(draw: Random, atoms: list[Atom]) -> list[Atom]:
    """Another value, of any type, under the key that a pair has."""
    at = pick(draw, atoms, "type")
    owner = atoms[at].owner
    span = [index for index, atom in enumerate(atoms) if atom.owner == owner]
    if atoms[span[2]].role != "type":
        return extreme(draw, atoms)  # a tensor row
    kind = draw.choice((*WIDTHS, STRING, ARRAY, ARRAY))
    new = [Atom("type", owner, struct.pack("<I", kind)), Atom("value", owner, gguf_value(draw, kind, 6))]
    return [*atoms[: span[2]], *new, *atoms[span[-1] + 1 :]]


def gguf_value(draw: Random, kind: int, depth: int) -> bytes:
    if kind == STRING:
        word = draw.choice(WORDS).encode()
        return struct.pack("<Q", len(word)) + word
    if kind == ARRAY:
        inner = ARRAY if depth and draw.random() < 0.5 else draw.choice((*WIDTHS, STRING))
        items = [gguf_value(draw, inner, depth - 1) for _ in range(draw.choice((0, 1, 2, 20)) if inner != ARRAY else 1)]
        return struct.pack("<IQ", inner, len(items)) + b"".join(items)
    number = draw.choice((*EXTREMES, *FLOATS))
    return (number % 256 ** WIDTHS[kind]).to_bytes(WIDTHS[kind], "little")


def swap(draw: Random, atoms: list[Atom]) -> list[Atom]:
    role = draw.choice(("offset", "dim", "text", "value", "type"))
    first, second = pick(draw, atoms, role), pick(draw, atoms, role)
    atoms[first], atoms[second] = (
        atoms[first]._replace(data=atoms[second].data),
        atoms[second]._replace(data=atoms[first].data),
    )
    return atoms


def twice_or_never(draw: Random, atoms: list[Atom]) -> list[Atom]:
    """A whole pair or row, the count corrected or not."""
    owner = draw.randrange(1, max(atom.owner for atom in atoms) + 1)
    span = [atom for atom in atoms if atom.owner == owner]
    twice = draw.random() < 0.5
    if span and draw.random() < 0.9:
        at = 3 if len(span) > 2 and span[2].role == "type" else 2
        count = int.from_bytes(atoms[at].data, "little") + (1 if twice else -1)
        atoms[at] = atoms[at]._replace(data=struct.pack("<Q", max(count, 0)))
    start = next((index for index, atom in enumerate(atoms) if atom.owner == owner), 0)
    return [*atoms[:start], *span * (2 if twice else 0), *atoms[start + len(span) :]]


def gguf_data(draw: Random, atoms: list[Atom]) -> list[Atom]:
    return [*atoms[:-1], atoms[-1]._replace(data=blindly(draw, atoms[-1].data))]


GGUF_CHANGES: Final[tuple[Callable[[Random, list[Atom]], list[Atom]], ...]] = (
    *(extreme, extreme, extreme, other_text, other_text, retype, retype, swap, twice_or_never, gguf_data),
)


# --- protocol buffers ------------------------------------------------------------------------------------------------


def message_fields(draw: Random, data: bytes) -> bytes:
    """A field of the outer message lost, doubled, moved, or changed inside with its length right or not."""
    fields = outer_fields(data)
    at = draw.randrange(len(fields))
    kind = draw.randrange(5)
    if kind == 0:
        fields.insert(draw.randrange(len(fields)), fields[at])
    elif kind == 1:
        fields.pop(at)
    elif kind == 2:
        other = draw.randrange(len(fields))
        fields[at], fields[other] = fields[other], fields[at]
    else:
        tag, content = fields[at]
        fields[at] = (tag, blindly(draw, content) if kind == 3 else put_number(draw, content))
    lying = draw.randrange(len(fields) or 1) if draw.random() < 0.2 else -1
    return b"".join(
        tag
        + (draw.choice((b"\xff" * 9 + b"\x01", b"\x80" * 20, b"\x00")) if index == lying else varint(len(content)))
        + content
        for index, (tag, content) in enumerate(fields)
    )


def outer_fields(data: bytes) -> list[tuple[bytes, bytes]]:
    """(tag, content) of a message whose fields all have a length."""
    fields, at = [], 0
    while at < len(data):
        tag, at = data[at : at + 1], at + 1
        size = shift = 0
        while True:
            size |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                break
        fields.append((tag, data[at : at + size]))
        at += size
    return fields


def varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
