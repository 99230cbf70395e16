"""Values as bytes that tell them apart, the same in every process: what a program is found by on disk."""

from __future__ import annotations

import enum
import re
import sys
from abc import ABC
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Protocol

import attrs
import numpy as np

from mlxcel_jax_cuda.sources import OWN, Unknown, foreign_digest

_NUMBERS: Final = (bool, int, complex, str)
_EMPTY: Final = (object, ABC, Generic, Protocol)
_PYTHON: Final = frozenset(sys.stdlib_module_names) | {"builtins"}


class NotPlain(TypeError):
    """A value, or one inside it, of which it cannot be said with certainty what it comes to in a program."""


def fingerprint(value: Any) -> bytes:
    """Different for any two values that differ in a type or in a value somewhere inside: plain values, arrays of NumPy,
    their containers, members of enumerations, records of attrs and objects without state. NotPlain for any other.

    An object with a method `plainly` is what that gives.
    """
    kind = type(value)
    if value is None or kind in _NUMBERS:
        return _tagged(kind.__name__, repr(value).encode())
    if kind is float:
        return _tagged("float", value.hex().encode())
    if kind is bytes:
        return _tagged("bytes", value)
    if isinstance(value, np.ndarray | np.generic):
        return _array(kind.__name__, np.asarray(value))
    if isinstance(value, np.dtype):
        return _tagged("dtype", value.str.encode() + value.name.encode())
    if kind in (list, tuple):
        return _joined(kind.__name__, map(fingerprint, value))
    if kind in (set, frozenset):
        return _joined(kind.__name__, sorted(map(fingerprint, value)))
    if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections", "types"):
        pairs = (_joined("pair", map(fingerprint, pair)) for pair in value.items())
        return _joined("mapping", sorted(pairs))
    return _of_class(value)


def _of_class(value: Any) -> bytes:
    kind = type(value)
    name = class_name(kind)
    if isinstance(value, enum.Enum):
        return _tagged(name, value.name.encode())
    if hasattr(kind, "plainly"):
        return _joined(name, [fingerprint(value.plainly())])
    if attrs.has(kind):
        fields = ((field.name, getattr(value, field.name)) for field in attrs.fields(kind))
        return _joined(name, (_joined("field", map(fingerprint, field)) for field in fields))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _joined(name, map(fingerprint, value))
    if not _without_state(value):
        raise NotPlain(f"{name} may have state")
    return _tagged("object", name.encode())


def _without_state(value: Any) -> bool:
    """Whether an object is all that its classes are: written in Python, and without a field."""
    classes = [base for base in type(value).__mro__ if base not in _EMPTY]
    fields = [*getattr(value, "__dict__", ()), *(name for base in classes for name in vars(base).get("__slots__", ()))]
    return bool(classes) and not fields and all(map(_written_in_python, classes))


def _written_in_python(kind: type[Any]) -> bool:
    """Others have fields that nobody sees."""
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", ""))
    try:
        text = Path(file).read_text(encoding="utf-8") if file.endswith(".py") else ""
    except (OSError, UnicodeDecodeError):
        return False
    return re.search(rf"^\s*class {kind.__name__}\b", text, re.MULTILINE) is not None


def function_name(function: Any) -> str:
    """The full name of a function of ours, jitted or not. NotPlain for any other."""
    name = f"{function.__module__}.{function.__qualname__}"
    if name.partition(".")[0] not in OWN or "<" in name:
        raise NotPlain(f"{name} may be another function another time")
    return name


def class_name(kind: type[Any]) -> str:
    """The full name of a class. Where it, or one that it inherits from, is another's, with a digest of the sources
    that it comes from. NotPlain where that cannot be told."""
    if "<" in kind.__qualname__:
        raise NotPlain(f"{kind.__qualname__} was made in a function")
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    try:
        digests = [foreign_digest(package) for package in sorted(packages.difference(OWN, _PYTHON))]
    except Unknown as error:
        raise NotPlain(f"{kind.__module__}.{kind.__qualname__}: {error}") from error
    return " ".join([f"{kind.__module__}.{kind.__qualname__}", *digests])


def _array(kind: str, value: np.ndarray) -> bytes:
    if value.dtype.hasobject:
        raise NotPlain("an array of objects")
    shape = repr((value.dtype.str, value.dtype.name, value.shape)).encode()
    return _joined(kind, [shape, np.ascontiguousarray(value).tobytes()])


def _tagged(tag: str, data: bytes) -> bytes:
    """With their lengths, so that no two lists of parts become the same bytes."""
    return b"%s:%d:%s" % (tag.encode(), len(data), data)


def _joined(tag: str, parts: Iterable[bytes]) -> bytes:
    listed = list(parts)
    return _tagged(f"{tag}*{len(listed)}", b"".join(_tagged("", part) for part in listed))
