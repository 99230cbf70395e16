"""Runs the program in this process, as a shell would: arguments, stdin, variables in; bytes and exit code out."""

from __future__ import annotations

import io
import sys

import attrs
import pytest

from mlxcel.cli.main import main


@attrs.frozen
class Ran:
    code: int
    out: str
    err: str


@attrs.frozen
class Cli:
    monkeypatch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[bytes]

    def __call__(self, *arguments: object, stdin: bytes = b"", **environ: str) -> Ran:
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
            for name, value in environ.items():
                patch.setenv(name, value)
            code = main([str(argument) for argument in arguments])
        captured = self.capture.readouterr()
        return Ran(code, captured.out.decode("utf-8"), captured.err.decode("utf-8"))
