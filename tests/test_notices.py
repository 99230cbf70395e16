"""A licence that asks something is told on stderr before anything is fetched, whatever the program then prints."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from cli_runs import Cli

from mlxcel.core.source import Progress
from mlxcel.plugins.sources import tiny, tiny_writer

NOTICE = "tiny is under terms, https://terms.example; using the model accepts them"
LINE = f"notice: {NOTICE}\n"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    return Cli(monkeypatch, capfdbinary)


@pytest.fixture(autouse=True)
def told_when_fetched(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> list[str]:
    """The source `tiny` with a notice; what stderr held when its fetch began."""
    before: list[str] = []
    fetch = tiny_writer.fetch

    def noting(target: Path, progress: Progress) -> None:
        before.append(capfdbinary.readouterr().err.decode())
        fetch(target, progress)

    monkeypatch.setattr(tiny, "SOURCE", attrs.evolve(tiny.SOURCE, notice=NOTICE))
    monkeypatch.setattr(tiny_writer, "fetch", noting)
    return before


@pytest.mark.parametrize(
    "arguments",
    [
        ("download", "tiny"),
        ("generate", "tiny", "--raw", "-p", "x", "-n", 1),
        ("generate", "tiny", "--raw", "-p", "x", "-n", 1, "--json"),
        ("-v", "download", "tiny"),
    ],
)
def test_the_notice_is_on_stderr_before_the_fetch(
    cli: Cli, told_when_fetched: list[str], arguments: tuple[object, ...]
) -> None:
    ran = cli(*arguments)
    assert ran.code == 0
    [before] = told_when_fetched
    assert LINE in before
    assert NOTICE not in ran.out + ran.err, "once, and never on stdout"
    if "--json" in arguments:
        assert json.loads(ran.out)["model"] == "tiny"
    assert NOTICE not in cli(*arguments).err, "it is stored: nothing is fetched"


@pytest.mark.parametrize("arguments", [("download", "tiny"), ("generate", "tiny", "--raw", "-p", "x", "-n", 1)])
def test_quiet_is_errors_alone(cli: Cli, told_when_fetched: list[str], arguments: tuple[object, ...]) -> None:
    ran = cli(*arguments, "-q")
    assert (ran.code, ran.err, told_when_fetched) == (0, "", [""])
