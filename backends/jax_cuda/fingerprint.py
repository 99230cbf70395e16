"""Values as bytes that tell them apart, the same in every process: what a program is found by on disk."""

from __future__ import annotations

import enum
import functools
import inspect
import re
import sys
from abc import ABC
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol

import attrs
import numpy as np

from mlxcel_jax_cuda.package_files import Unknown
from mlxcel_jax_cuda.sources import OWN, foreign_digest

_PRINTED: Final = (bool, complex, str)
_MAPPINGS: Final = (dict, OrderedDict, MappingProxyType)
_OF_NUMPY: Final = ("numpy", "ml_dtypes")
_EMPTY: Final = (object, ABC, Generic, Protocol)
_MADE: Final = {"__weakref__", "_attrs_cached_hash"}
"""Fields that attrs gives a class, which say nothing of its own."""
_PYTHON: Final = frozenset(sys.stdlib_module_names) | {"builtins"}


class NotPlain(TypeError):
    """A value, or one inside it, of which it cannot be said with certainty what it comes to in a program."""


def fingerprint(value: Any) -> bytes:
    """Different for any two values that differ in a type or in a value somewhere inside: plain values, arrays of NumPy,
    their containers in their order, members of enumerations, records of attrs and objects without state. NotPlain for
    any other, and for what holds more than that.

    An object with a method `plainly` is what that gives.
    """
    kind = type(value)
    if value is None or kind in _PRINTED:
        return _tagged(kind.__name__, repr(value).encode())
    if kind is int:
        return _tagged("int", b"%x" % value)
    if kind is float:
        return _tagged("float", value.hex().encode())
    if kind is bytes:
        return _tagged("bytes", value)
    if isinstance(value, np.ndarray | np.generic) and kind.__module__ in _OF_NUMPY:
        return _array(kind.__name__, np.asarray(value))
    if isinstance(value, np.dtype):
        return _tagged("dtype", _type_of_numbers(value))
    if kind in (list, tuple):
        return _joined(kind.__name__, map(fingerprint, value))
    if kind in (set, frozenset):
        return _joined(kind.__name__, sorted(map(fingerprint, value)))
    if kind in _MAPPINGS:
        return _joined("mapping", (_joined("pair", map(fingerprint, pair)) for pair in value.items()))
    return _of_class(value)


def _of_class(value: Any) -> bytes:
    kind = type(value)
    name = class_name(kind)
    if isinstance(value, enum.Enum):
        return _joined(name, map(fingerprint, (value.name, value.value)))
    if hasattr(kind, "plainly"):
        return _joined(name, [fingerprint(value.plainly())])
    fields = [field.name for field in attrs.fields(kind)] if attrs.has(kind) else []
    row = issubclass(kind, tuple) and hasattr(kind, "_fields")
    _require_no_more(value, fields, (tuple,) if row else ())
    told = [(field, getattr(value, field)) for field in fields] + (list(value) if row else [])
    return _joined(name, map(fingerprint, told))


def _require_no_more(value: Any, fields: Iterable[str], told: Iterable[type[Any]]) -> None:
    """NotPlain unless an object is these fields, what is `told` of it otherwise, and classes written in Python."""
    kind = type(value)
    classes = [base for base in kind.__mro__ if base not in {*_EMPTY, *told}]
    held = {name for name in getattr(value, "__dict__", ()) if not _found_from_others(kind, name)}
    # attrs writes the slots of its own classes: their fields, and what is found from these.
    held.update(*(vars(base).get("__slots__", ()) for base in classes if "__attrs_attrs__" not in vars(base)))
    if not classes or held - _MADE - {*fields} or not all(map(_written_in_python, classes)):
        raise NotPlain(f"{kind.__module__}.{kind.__qualname__} may have state")


def _found_from_others(kind: type[Any], name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


@functools.cache
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
    made_of = [_type_of_numbers(value.dtype), repr(value.shape).encode()]
    return _joined(kind, [*made_of, np.ascontiguousarray(value).tobytes()])


def _type_of_numbers(dtype: np.dtype) -> bytes:
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise NotPlain(f"{dtype} is no type of numbers")
    return repr((dtype.str, dtype.name)).encode()


def _tagged(tag: str, data: bytes) -> bytes:
    """With their lengths, so that no two lists of parts become the same bytes."""
    return b"%s:%d:%s" % (tag.encode(), len(data), data)


def _joined(tag: str, parts: Iterable[bytes]) -> bytes:
    listed = list(parts)
    return _tagged(f"{tag}*{len(listed)}", b"".join(_tagged("", part) for part in listed))
