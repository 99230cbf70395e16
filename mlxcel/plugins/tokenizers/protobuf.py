"""The wire format of protocol buffers, as much as a reader of known messages needs, every length checked.

Source: https://protobuf.dev/programming-guides/encoding. Groups, which no current message uses, are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5
MAX_VARINT: Final = 10  # bytes of a 64-bit number


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field: an unsigned integer (64-bit two's complement), or the bytes of a message, string
    or fixed-width number. Raises ValueError with the place for data that are no message."""
    at, size = 0, len(data)
    while at < size:
        start = at
        key, at = (data[at], at + 1) if data[at] < 0x80 else varint(data, at)
        number, wire = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise ValueError(f"field number {number} at byte {start}")
        if wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
        elif wire in (VARINT, BYTES):
            value, at = (data[at], at + 1) if at < size and data[at] < 0x80 else varint(data, at)
            if wire == VARINT:
                yield number, value
                continue
            length = value
        else:
            raise ValueError(f"wire type {wire} at byte {start}")
        if length > size - at:
            raise ValueError(f"field {number} at byte {start} claims {length} bytes, {size - at} are left")
        yield number, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer and the place behind it."""
    value = 0
    for place, byte in enumerate(data[at : at + MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    if at + MAX_VARINT > len(data):
        raise ValueError(f"the number at byte {at} is cut off")
    raise ValueError(f"the number at byte {at} has more than {MAX_VARINT} bytes")


def as_bytes(value: int | bytes) -> bytes:
    """A value that must be a message, a string or bytes."""
    if isinstance(value, int):
        raise ValueError(f"a number ({value}) where bytes are expected")
    return value


def as_text(value: int | bytes) -> str:
    return as_bytes(value).decode()  # UnicodeDecodeError is a ValueError


def as_float(value: int | bytes) -> float:
    data = as_bytes(value)
    if len(data) != 4:
        raise ValueError(f"{len(data)} bytes where a float of 4 is expected")
    return float(struct.unpack("<f", data)[0])


def as_signed(value: int | bytes) -> int:
    """An int32, int64, enum or bool."""
    if not isinstance(value, int):
        raise ValueError(f"{len(value)} bytes where a number is expected")
    return value - (1 << 64) if value >> 63 else value
