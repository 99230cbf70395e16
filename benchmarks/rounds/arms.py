"""Arms: a name and the flags that a program gets under it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

NULL = "-null"
"""Ends the name of a null arm, and of no other."""


@dataclass(frozen=True)
class Arm:
    """`source` is the arm that a null arm copies, flag by flag; None for an arm of its own."""

    name: str
    flags: tuple[str, ...]
    source: str | None = None


def parse_arm(text: str) -> Arm:
    """NAME=FLAGS, split as a shell would. The first `=` ends the name, those behind it belong to the flags. ValueError
    says what is wrong."""
    name, sign, flags = text.partition("=")
    if not sign:
        raise ValueError(f'{text!r} is no NAME="FLAGS": write {text}= for an arm without flags')
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ValueError(f"{name!r} is no name of an arm: letters, digits, '.', '_' and '-'")
    if name.endswith(NULL):
        raise ValueError(f"{name!r}: names that end with {NULL!r} are those of null arms, which are made by themselves")
    try:
        return Arm(name, tuple(shlex.split(flags)))
    except ValueError as error:
        raise ValueError(f"the flags of {name!r}: {error}") from None


def with_nulls(arms: Sequence[Arm], every: bool) -> list[Arm]:
    """The arms, and behind them a null arm of the first, or of `every` one. ValueError for a name that comes twice."""
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two arms are named {', '.join(twice)}")
    return [*arms, *(Arm(arm.name + NULL, arm.flags, arm.name) for arm in (arms if every else arms[:1]))]
