"""`list`, `download` and `rm` (docs/spec/clients.md 1.8). Errors go through: the program prints them and exits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import attrs
import pytest
import tokenizers
from click.testing import CliRunner, Result
from source_doubles import GGUF, LICENCE, WEIGHTS, CountingFetch, Recorder, no_fetch, register

import mlxcel.cli.download
import mlxcel.cli.list
import mlxcel.cli.rm
from mlxcel.core.source import ModelSource
from mlxcel.errors import DownloadError, UnknownModel, UsageError
from mlxcel.plugins.manager import PluginManager
from mlxcel.store import ModelStore


@attrs.define
class Context:
    """What the program hands to a command, as far as these commands look."""

    store_root: Path
    sources: Mapping[str, ModelSource]
    offline: bool = False
    told: Recorder = attrs.field(factory=Recorder)
    said: list[str] = attrs.field(factory=list)

    @property
    def config(self) -> Context:
        return self

    def plugins(self) -> Context:
        return self

    def model_sources(self) -> Mapping[str, ModelSource]:
        return self.sources

    def progress(self) -> Recorder:
        return self.told

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    sources = {name: register(monkeypatch, CountingFetch(), name) for name in ("tiny", "other")}
    return Context(tmp_path / "store", sources)


def run(module: ModuleType, context: Context, *arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(module.command, arguments, obj=context, catch_exceptions=False, input=answer)


def test_download_prints_paths_alone(context: Context) -> None:
    result = run(mlxcel.cli.download, context, "tiny", "other")
    root = context.store_root
    assert result.exit_code == 0
    assert result.stdout == f"{root / 'tiny' / GGUF}\n{root / 'other' / GGUF}\n"
    assert result.stderr == ""
    assert context.told.names == ["verify", "verify"]


def test_download_verifies_and_force_fetches(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    run(mlxcel.cli.download, context, "tiny")
    counting = CountingFetch()
    context.sources = {"tiny": register(monkeypatch, no_fetch)}
    assert run(mlxcel.cli.download, context, "tiny").exit_code == 0
    context.sources = {"tiny": register(monkeypatch, counting)}
    assert run(mlxcel.cli.download, context, "tiny", "--force").exit_code == 0
    assert counting.calls == 1
    with pytest.raises(UnknownModel, match="'absent'"):
        run(mlxcel.cli.download, context, "absent")
    assert run(mlxcel.cli.download, context).exit_code == 2


def test_download_tells_a_notice_apart_from_paths(context: Context) -> None:
    context.sources = {"tiny": attrs.evolve(context.sources["tiny"], notice="read https://terms.example")}
    result = run(mlxcel.cli.download, context, "tiny")
    assert result.stdout == f"{context.store_root / 'tiny' / GGUF}\n"
    assert context.said == ["notice: read https://terms.example"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tiny", "--revision", "v1"), "'tiny' has no revisions"),
        (("o/n@v1", "--revision", "v2"), "names the revision 'v1' and --revision 'v2'"),
        (("o/n", "--revision", "a b"), "is no branch, tag or commit"),
        (("tiny", "other", "--export-tokenizer", "out"), "of one model, 2 are named"),
        (("tiny", "--export-tokenizer", "full"), "full is not empty"),
    ],
)
def test_what_download_refuses_before_it_fetches(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match=words) as caught:
        run(mlxcel.cli.download, context, *arguments)
    assert caught.value.hint
    assert not context.store_root.exists()


@pytest.mark.parametrize(
    ("name", "revision", "asked"),
    [
        ("o/n", "v1", "o/n@v1"),
        ("o/n:q8_0", "v1", "o/n@v1:Q8_0"),
        ("o/n@v1", "v1", "o/n@v1"),
        ("o/n", "main", "o/n"),
        ("o/n", "refs/pr/1", "o/n@refs/pr/1"),
    ],
)
def test_a_revision_is_part_of_the_name(context: Context, name: str, revision: str, asked: str) -> None:
    context.offline = True
    with pytest.raises(DownloadError, match=f"^{asked} is not in the model store"):
        run(mlxcel.cli.download, context, name, "--revision", revision)


def test_download_exports_the_tokenizer_of_what_is_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager.load(only=(), trace=None)
    context = Context(tmp_path / "store", manager.model_sources())
    monkeypatch.setattr(Context, "plugins", lambda self: manager)
    for place in (1, 2):
        folder = tmp_path / f"out{place}"
        result = run(mlxcel.cli.download, context, "tiny", "--export-tokenizer", str(folder))
        assert result.stdout == f"{context.store_root / 'tiny'}\n"
        written = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert written.encode("hi<|im_end|>").ids == [*b"hi", 258]
        assert "<|im_start|>" in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert context.said == [
        f"tokenizer: {tmp_path}/out{place}/tokenizer.json, {tmp_path}/out{place}/tokenizer_config.json"
        for place in (1, 2)
    ]


def test_a_model_of_the_hub_is_listed_and_removed_by_its_name(context: Context) -> None:
    """Fetched as the hub's source does it, with a commit, under a name that is none of a folder."""
    source = attrs.evolve(context.sources["tiny"], name="o/n:Q4_1", license="gemma", revision="c0ffee")
    ModelStore(context.store_root).fetch(source)
    context.sources = {}
    _, line = run(mlxcel.cli.list, context).stdout.splitlines()
    assert line.split()[:6] == ["o/n:Q4_1", "307.2", "kB", "gguf", "Q4_1", "gemma"]
    [row] = json.loads(run(mlxcel.cli.list, context, "--json").stdout)
    assert (row["name"], row["revision"], row["license"]) == ("o/n:Q4_1", "c0ffee", "gemma")
    assert run(mlxcel.cli.rm, context, "-y", "o/n:Q4_1").exit_code == 0
    assert ModelStore(context.store_root).list() == []


def test_list_shows_stored_models_and_registered_names(context: Context) -> None:
    run(mlxcel.cli.download, context, "tiny")
    header, tiny, other = run(mlxcel.cli.list, context).stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "FORMAT", "QUANTISATION", "LICENCE", "SOURCE", "FETCHED"]
    assert tiny.split()[:7] == ["tiny", "307.2", "kB", "gguf", "Q4_1", "MIT", "source_of_tiny:fetch"]
    assert other.split() == ["other", "1.0", "kB", "gguf", "Q4_1", "MIT", "source_of_other:fetch", "not", "fetched"]
    assert header.index("SIZE") == tiny.index("307.2") == other.index("1.0 kB")


def test_list_json(context: Context) -> None:
    run(mlxcel.cli.download, context, "tiny")
    tiny, other = json.loads(run(mlxcel.cli.list, context, "--json").stdout)
    assert tiny["size"] == len(WEIGHTS) + len(LICENCE)
    assert tiny["path"] == str(context.store_root / "tiny" / GGUF)
    assert tiny["fetched"]
    assert other == {
        "name": "other",
        "size": None,
        "download_size": 1000,
        "format": "gguf",
        "quantisation": "Q4_1",
        "source": "source_of_other:fetch",
        "license": "MIT",
        "revision": None,
        "fetched": None,
        "path": None,
        "damage": None,
    }
    (context.store_root / "tiny" / GGUF).unlink()
    assert "No such file" in json.loads(run(mlxcel.cli.list, context, "--json").stdout)[0]["damage"]
    assert run(mlxcel.cli.list, context).stdout.splitlines()[1].endswith("damaged")


def test_list_of_nothing_is_a_header_or_an_empty_array(tmp_path: Path) -> None:
    nothing = Context(tmp_path / "store", {})
    assert len(run(mlxcel.cli.list, nothing).stdout.splitlines()) == 1
    assert json.loads(run(mlxcel.cli.list, nothing, "--json").stdout) == []


def test_rm_without_a_terminal_needs_y(context: Context) -> None:
    run(mlxcel.cli.download, context, "tiny")
    with pytest.raises(UsageError, match="not a terminal") as caught:
        run(mlxcel.cli.rm, context, "tiny", answer="y\n")
    assert caught.value.exit_code == 2
    assert run(mlxcel.cli.rm, context, "-y", "tiny", "tiny").exit_code == 0
    assert ModelStore(context.store_root).list() == []


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_rm_asks_on_stderr(context: Context, monkeypatch: pytest.MonkeyPatch, answer: str, left: int) -> None:
    run(mlxcel.cli.download, context, "tiny")
    monkeypatch.setattr("mlxcel.cli.rm._asks", lambda: True)
    result = run(mlxcel.cli.rm, context, "tiny", answer=answer)
    assert result.exit_code == 0
    assert "delete tiny (307.2 kB)? [y/N]" in result.stderr
    assert result.stdout.strip() == ""
    assert len(ModelStore(context.store_root).list()) == left


@pytest.mark.parametrize("name", ["other", "..", "../store/tiny", ".", "/", "tni"])
def test_rm_takes_only_names_of_the_store_and_all_or_none(context: Context, name: str) -> None:
    run(mlxcel.cli.download, context, "tiny")
    with pytest.raises(UnknownModel) as caught:
        run(mlxcel.cli.rm, context, "-y", "tiny", name)
    assert caught.value.exit_code == 2
    assert repr(name) in caught.value.message
    assert "tiny" in str(caught.value.hint)
    assert len(ModelStore(context.store_root).list()) == 1


def test_rm_refuses_a_model_in_use(context: Context) -> None:
    run(mlxcel.cli.download, context, "tiny")
    with ModelStore(context.store_root).use("tiny"), pytest.raises(UsageError, match="in use"):
        run(mlxcel.cli.rm, context, "-y", "tiny")
    assert len(ModelStore(context.store_root).list()) == 1
