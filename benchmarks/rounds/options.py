"""The options of engine_bench_rounds.py, checked."""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from rounds.arms import Arm, parse_arm, with_nulls
from rounds.host import BUSY

T = TypeVar("T")
MOST_ROUNDS = 10_000


@dataclass(frozen=True)
class Options:
    """`arms` hold the null arms, behind the others. `summarise` is a file that is only computed from."""

    bin: tuple[str, ...]
    model: str | None
    arms: tuple[Arm, ...]
    prompts: tuple[int, ...]
    max_tokens: int
    extra: tuple[str, ...]
    rounds: int
    out: Path | None
    append: bool
    gate: bool
    gate_strict: bool
    gate_timeout: float
    gate_load: float
    gate_busy: tuple[str, ...]
    run_timeout: float
    summarise: Path | None
    compare: Path | None

    def command(self, arm: Arm) -> list[str]:
        """The flags of the arm come last: they may say more than those of every arm, or otherwise."""
        model = [] if self.model is None else [self.model]
        lengths = ",".join(map(str, self.prompts))
        every = ["--prompt-tokens", lengths, "--max-tokens", str(self.max_tokens), *self.extra]
        return [*self.bin, *model, *every, *arm.flags]


def parse(argv: Sequence[str] | None, description: str) -> Options:
    """SystemExit with 2, saying why, for what cannot be run. No file is made."""
    parser = _parser(description)
    given = parser.parse_args(argv)
    try:
        arms = with_nulls(given.arm, given.null_every_arm)
        command = _words(given.bin)
    except ValueError as error:
        parser.error(str(error))
    if given.summarise is not None:
        if given.arm or given.out is not None or given.append:
            parser.error("--summarise runs nothing: --arm, --out and --append do not go with it")
    elif not arms:
        parser.error("--arm is needed: what is to be measured")
    elif given.out is None:
        parser.error("--out is needed: where the records go")
    elif not command or shutil.which(command[0]) is None:
        parser.error(f"--bin: there is no program {(command or [''])[0]!r}")
    elif given.model is not None and given.model.startswith("-"):
        parser.error(
            f"--model {given.model}: a name that begins with '-' would be taken for a flag; write ./ before it"
        )
    elif not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: there is no folder {given.out.parent}")
    elif given.out.exists() and not given.out.is_file():
        parser.error(f"--out {given.out} is no file that rounds can be kept in")
    elif given.out.exists() and not given.append:
        parser.error(f"--out {given.out} exists: --append adds rounds to it; or name another file")
    return Options(
        tuple(command), given.model, tuple(arms), tuple(dict.fromkeys(chain(*given.prompt_tokens))),
        given.max_tokens, tuple(given.extra), given.rounds, given.out, given.append, given.gate, given.gate_strict,
        given.gate_timeout, given.gate_load, tuple(given.gate_busy), given.run_timeout, given.summarise, given.compare,
    )  # fmt: skip


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--bin", default="mlxcel bench-engine", metavar="CMD", help="split as a shell would, run without one")
    add("--model", metavar="M", help="the program's first argument")
    add("--arm", action="append", default=[], type=_told(parse_arm), metavar='NAME="FLAGS"', help="repeatable")
    add("--prompt-tokens", nargs="+", type=_told(_lengths), default=[[256, 8192]], metavar="N")
    add("--max-tokens", type=_told(_whole(2)), default=128, metavar="N")
    add("--extra", type=_told(_words), default=[], metavar="FLAGS", help='of every arm; one alone: --extra="--flag"')
    add("--rounds", type=_told(_whole(1, MOST_ROUNDS)), default=5, metavar="N", help="differences need two")
    add("--null-every-arm", action="store_true", help="a null arm of each; by itself of the first")
    add("--out", type=Path, metavar="FILE", help="JSON lines")
    add("--append", action="store_true", help="more rounds of the same arms into a file that exists")
    add("--gate", action=argparse.BooleanOptionalAction, default=True, help="wait for a quiet host")
    add("--gate-strict", action="store_true", help="end with 3 where it does not become quiet")
    add("--gate-timeout", type=_told(_amount(zero=True)), default=300.0, metavar="S")
    add("--gate-load", type=_told(_amount(zero=False)), default=0.5, metavar="X", help="processes ready to run, a core")
    add("--gate-busy", type=_names, default=list(BUSY), metavar="LIST", help="names of processes, '*' for any letters")
    add("--run-timeout", type=_told(_amount(zero=True)), default=3600.0, metavar="S", help="of a process; 0: none")
    add("--summarise", type=Path, metavar="FILE", help="compute the summary of an earlier file")
    add("--compare", type=Path, metavar="FILE", help="end with 1 where a median lost more than its threshold")
    return parser


def _told(read: Callable[[str], T]) -> Callable[[str], T]:
    """The reader's own words are shown, not argparse's."""

    def told(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return told


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _lengths(text: str) -> list[int]:
    return [_whole(1)(part) for part in text.split(",")]


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        digits = text.strip()
        if not digits.isdecimal() or len(digits) > len(str(most)) or not least <= int(digits) <= most:
            raise ValueError(f"{text!r} is no whole number from {least} to {most}")
        return int(digits)

    return read


def _amount(*, zero: bool) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 <= value < math.inf) or (value == 0 and not zero):
            raise ValueError(f"{text!r} is no number {'of at least' if zero else 'above'} 0")
        return value

    return read
