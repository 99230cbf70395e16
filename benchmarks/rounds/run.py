"""One run of rounds: processes by the schedule, and the file of records that they fill."""

from __future__ import annotations

import platform
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rounds import process
from rounds.comparison import check_place, check_plan, compare
from rounds.gate import Gate, Passed
from rounds.options import Options
from rounds.process import TAIL_LINES
from rounds.records import Record, RecordFile, Refused, of_kind, parse_line, read_records
from rounds.schedule import Entry, schedule
from rounds.summary import summarise
from rounds.tables import summary_lines

FAILED = 3
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Parts of names of variables whose values are not recorded."""


class Interrupted(KeyboardInterrupt):
    """By a signal of that number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Failed(Exception):
    """The run stops; a record says why."""


class Run:
    """`gate` is None for processes that do not wait; `gate_facts` go into the header, with what is told of
    `environment`. Refused where the files named in the options are not what they should be."""

    def __init__(
        self, options: Options, gate: Gate | None, gate_facts: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        assert options.out is not None
        self._options, self._gate = options, gate
        self._base = None if options.compare is None else read_records(options.compare)
        self._records = read_records(options.out) if options.out.exists() else []
        self._first = 1 + max((row["round"] for row in of_kind(self._records, "row")), default=-1)
        self._file = RecordFile(options.out)
        self._header = self._planned_header(gate_facts, environment)
        self._met = self._begun = False  # the first program; the file

    def __call__(self) -> int:
        """The exit code. Refused, with no file left behind, for what is not comparable: as far as it is known before
        any process, and for what a program tells of itself as soon as it does."""
        self._check_plan()
        options, code = self._options, 0
        entries = list(schedule(options.arms, range(self._first, self._first + options.rounds)))
        self._begin_file()
        try:
            for number, entry in enumerate(entries, 1):
                say(f"{number} of {len(entries)}: round {entry.round}, {entry.arm.name}")
                self._process(entry)
        except Failed as error:
            say(f"stopped: {error}")
            code = FAILED
        except KeyboardInterrupt as stop:
            say("interrupted")
            code = 128 + getattr(stop, "number", signal.SIGINT)
        except Refused:
            self._file.drop()
            raise
        if not self._begun:
            self._file.drop()
            return code
        summaries = summarise(self._records)
        self._file.write(summaries)
        self._file.end()
        print(*summary_lines(summaries), sep="\n", flush=True)
        return code or (0 if self._base is None else compare(self._base, self._records))

    # --- one process --------------------------------------------------------------------------------------------------

    def _process(self, entry: Entry) -> None:
        """Its rows go to the file when it has ended. Failed behind the record that says why."""
        command = self._options.command(entry.arm)
        rows: list[Record] = []
        noise: list[str] = []
        passed = Passed(0.0, None) if self._gate is None else self._gate.wait()
        place = {
            "arm": entry.arm.name, "round": entry.round, "position": entry.position, "started": now(),
            "gate_wait_s": passed.wait_s, "gate_reason": passed.reason,
        }  # fmt: skip

        def take(line: str) -> None:
            record = parse_line(line)
            if record is None:
                noise.append(line)
            elif record.get("kind") == "row":
                rows.append(record)
            elif record.get("kind") == "header":
                self._meet(record)

        def fail(reason: str, code: int | None, errors: Sequence[str] = ()) -> NoReturn:
            record = {
                "kind": "failure", "reason": reason, **place, "exit_code": code, "command": command,
                "stderr": list(errors), "noise": noise[-TAIL_LINES:],
            }  # fmt: skip
            self._write([record])
            raise Failed("\n".join([f"{reason} ({entry.arm.name} in round {entry.round}, exit code {code})", *errors]))

        if passed.reason is not None:
            say(f"the host is not quiet after {passed.wait_s:.0f} s: {passed.reason}")
            if self._options.gate_strict:
                fail(f"busy host: {passed.reason}", None)
        try:
            ended = process.run(command, timeout_s=self._options.run_timeout, on_line=take)
        except OSError as error:
            fail(f"not started: {error}", None)
        self._write([{**row, **place, "exit_code": ended.exit_code} for row in rows])
        if ended.exit_code is None:
            fail("timeout", None, ended.errors)
        if ended.exit_code != 0:
            fail("exit code", ended.exit_code, ended.errors)
        if not rows:
            fail("no rows", 0, ended.errors)

    # --- the file -----------------------------------------------------------------------------------------------------

    def _planned_header(self, gate_facts: Mapping[str, Any], environment: Mapping[str, str]) -> Record:
        options = self._options
        return {
            "kind": "header", "bin": list(options.bin), "model": options.model,
            "arms": [{"name": arm.name, "flags": list(arm.flags)} for arm in options.arms if arm.source is None],
            "nulls": [
                {"name": arm.name, "source": arm.source, "flags": list(arm.flags)}
                for arm in options.arms if arm.source is not None
            ],
            "rounds": options.rounds, "prompt_tokens": list(options.prompts), "max_tokens": options.max_tokens,
            "extra": list(options.extra), "run_timeout_s": options.run_timeout, "gate": dict(gate_facts),
            "host": socket.gethostname(), "cpu": cpu(), "device": None, "time": now(), "env": told(environment),
        }  # fmt: skip

    def _check_plan(self) -> None:
        """Against the earlier rounds; rounds are added only to those of the same arms and cells."""
        if self._base is not None:
            check_plan(self._base, self._header)
        for earlier in of_kind(self._records, "header")[:1]:
            for name in ("bin", "arms", "nulls", "prompt_tokens", "max_tokens", "extra"):
                if self._header[name] != earlier[name]:
                    raise Refused(f"--append: {name} is {self._header[name]}, and was {earlier[name]} in the file")

    def _meet(self, program: Record) -> None:
        """The first program, by its header."""
        if self._met:
            return
        self._met = True
        device, model = program.get("device"), program.get("model", self._options.model)
        self._header |= {"device": device, "model": model, "program": program}
        for earlier in (self._base, self._records):
            if earlier:
                check_place(of_kind(earlier, "header")[0], self._header)

    def _begin_file(self) -> None:
        """Refused where another run has added to it since it was read: the numbers of the rounds would come twice."""
        self._file.begin(append=self._options.append)
        if self._records and len(read_records(self._file.path)) != len(self._records):
            self._file.end()
            raise Refused(f"{self._file.path}: another run has added to it just now; begin again")

    def _write(self, records: Sequence[Record]) -> None:
        """Behind the header, which waits for what the first program tells."""
        self._meet({})
        written = [*([] if self._begun else [self._header]), *records]
        self._begun = True
        self._file.write(written)
        self._records += written


def cpu() -> str:
    """The processor's own name where the system tells it."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(errors="replace").splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def told(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of mlxcel, but no secret's value."""
    return {
        name: "(not recorded)" if any(part in name for part in SECRET) else value
        for name, value in sorted(environment.items())
        if name.startswith("MLXCEL_")
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
