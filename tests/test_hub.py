"""Models of Hugging Face, by its own library against a hub on loopback (docs/spec/clients.md 1.9; tests 9, 10)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Cli
from hub_server import COMMIT, GGUFS, SAFETENSORS, WEIGHTS, Hub, serving_alone, sha256, two_repositories
from source_doubles import Recorder, files_under
from tiny_checkpoint import write_tiny_llama

from mlxcel.errors import DownloadError, UsageError
from mlxcel.plugins.sources.hub_licence import Licence
from mlxcel.resolve import ResolvedModel, download_model, resolve_model
from mlxcel.store import HubName, ModelStore


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_alone(two_repositories(), monkeypatch, tmp_path / "hf") as served:
        yield served


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def resolve(name: str, store: ModelStore, *, offline: bool = False, progress: Recorder | None = None) -> ResolvedModel:
    return resolve_model(name, sources={}, store=store, offline=offline, progress=progress)


# --- what is fetched ----------------------------------------------------------------------------------------------


def test_a_folder_is_fetched_once_and_then_used_without_a_question(hub: Hub, store: ModelStore) -> None:
    progress = Recorder()
    found = resolve("o/n", store, progress=progress)
    wanted = {name: data for name, data in SAFETENSORS.items() if name not in ("README.md", "pytorch_model.bin")}
    assert {path.name: path.read_bytes() for path in found.path.iterdir() if path.name != "mlxcel-model.json"} == wanted
    assert (found.name, found.source, found.stored) == ("n", "huggingface", store.get("o/n"))
    assert found.stored is not None
    assert (found.stored.revision, found.stored.license) == (COMMIT, "apache-2.0")
    assert {file.name: file.sha256 for file in found.stored.files} == {n: sha256(d) for n, d in wanted.items()}
    assert not [path for path in hub.paths("GET") if "README" in path or ".bin" in path]

    (phase, total, told), (verify, _, _) = progress.phases
    assert (phase, total, verify) == ("download", sum(map(len, wanted.values())), "verify")
    assert told == sorted(told), "a bar never goes back"
    assert told[-1] == total

    asked = len(hub.asked)
    for again in ("o/n", "o/n@main"):
        for offline in (False, True):
            assert resolve(again, store, offline=offline) == found
            assert download_model(again, sources={}, store=store, offline=offline) == found.path
    assert len(hub.asked) == asked
    assert files_under(store.root) == [
        ".locks/o--n@main",
        *(f"o--n@main/{n}" for n in sorted([*wanted, "mlxcel-model.json"])),
    ]


def test_an_existing_path_is_no_name_of_the_hub(
    hub: Hub, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o" / "n").mkdir(parents=True)
    found = resolve("o/n", store)
    assert (found.path, found.source) == (Path("o/n"), "path")
    assert hub.asked == []


def test_a_model_of_the_hub_answers_a_prompt(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", shards=2)
    hub.repositories["o/n"].files = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    cli, arguments = Cli(monkeypatch, capfdbinary), ("--raw", "-p", "hello", "-n", 3, "--json", "-q")
    replies = [json.loads(cli("generate", model, *arguments).out) for model in (folder, "o/n", "o/n@main")]
    assert len({tuple(reply["token_ids"]) for reply in replies}) == 1
    assert [reply["model"] for reply in replies] == ["tiny", "n", "n"]
    assert [reply["details"]["model"]["source"] for reply in replies] == ["path", "huggingface", "huggingface"]


def test_each_choice_of_a_gguf_is_a_model_of_its_own(hub: Hub, store: ModelStore) -> None:
    large, small = resolve("o/g:q8_0", store), resolve("o/g:m-Q4_0.gguf", store)
    assert (large.path.name, large.path.read_bytes()) == ("m-Q8_0.gguf", WEIGHTS)
    assert (small.path.name, small.path.read_bytes()) == ("m-Q4_0.gguf", WEIGHTS[:1000])
    assert [(model.name, model.quantisation) for model in store.list()] == [
        ("o/g:Q8_0", "Q8_0"),
        ("o/g:m-Q4_0.gguf", "Q4_0"),
    ]
    assert resolve("o/g:Q8_0", store, offline=True) == large
    with store.use("o/g:Q8_0"), pytest.raises(UsageError, match="'o/g:Q8_0' is in use"):
        store.remove("o/g:Q8_0")
    store.remove("o/g:Q8_0")
    assert [model.name for model in store.list()] == ["o/g:m-Q4_0.gguf"]
    assert files_under(store.root / ".tmp") == []


def test_a_revision_becomes_a_commit_and_a_model_of_its_own(hub: Hub, store: ModelStore) -> None:
    hub.repositories["o/n"].revisions = ("main", "refs/pr/1")
    found = resolve("o/n@refs/pr/1", store)
    assert found.stored is not None
    assert (found.stored.name, found.stored.revision) == ("o/n@refs/pr/1", COMMIT)
    assert {path.split("/resolve/")[1].split("/")[0] for path in hub.paths("HEAD")} == {COMMIT}
    with pytest.raises(DownloadError, match="offline"):
        resolve("o/n", store, offline=True)


def test_what_moved_is_fetched_again_with_force_alone(hub: Hub, store: ModelStore) -> None:
    path = download_model("o/g:Q4_0", sources={}, store=store, offline=False)
    hub.repositories["o/g"].files = {**GGUFS, "m-Q4_0.gguf": b"new"}
    assert download_model("o/g:Q4_0", sources={}, store=store, offline=False).read_bytes() == WEIGHTS[:1000]
    download_model("o/g:Q4_0", sources={}, store=store, offline=False, force=True)
    assert path.read_bytes() == b"new"
    path.write_bytes(b"old")
    assert download_model("o/g:Q4_0", sources={}, store=store, offline=False).read_bytes() == b"new"


def test_the_token_is_the_librarys_own_and_stays_at_the_hub(
    hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve("o/g:Q4_0", store)
    told = {path: token for _, path, token in hub.asked if "/api/agent" not in path}
    assert told.pop("/cdn/o/g::m-Q4_0.gguf") is False
    assert set(told.values()) == {True}
    assert "hf_secret" not in (store.root / "o--g@main+Q4_0" / "mlxcel-model.json").read_text()


# --- licences -----------------------------------------------------------------------------------------------------


NOTHING = "o/g names no licence: the card of o/g may say"


@pytest.mark.parametrize(
    ("card", "name", "words"),
    [
        ({"license": "mit"}, "mit", None),
        ({"license": ["mit", "apache-2.0"]}, "mit, apache-2.0", None),
        ({"license": ["mit", "gemma"]}, "mit, gemma", "licence mit, gemma"),
        ({"license": "gemma"}, "gemma", "licence gemma, which may restrict what it is used for: see the card of o/g;"),
        (
            {"license": "other", "license_name": "tongyi", "license_link": "https://licence.example"},
            "tongyi",
            "licence tongyi, which may restrict what it is used for: see https://licence.example;",
        ),
        ({"license": "other", "license_link": "LICENSE"}, "other", "licence other, "),
        ({"license": "other", "license_link": "https://a\x1b[31m"}, "other", "see the card of o/g"),
        ({}, "unknown", NOTHING),
        ({"license": None}, "unknown", NOTHING),
        ({"license": 7}, "unknown", NOTHING),
        ({"license": "a\x1b[31m"}, "unknown", NOTHING),
        ({"license": "x" * 65}, "unknown", NOTHING),
    ],
)
def test_a_licence_that_may_ask_something_has_a_notice(card: dict[str, object], name: str, words: str | None) -> None:
    licence = Licence.of_card(card)
    notice = licence.notice(HubName("o", "g"))
    assert licence.name == name
    assert (notice is None) == (words is None)
    assert words is None or words in str(notice)


def test_the_notice_is_told_before_any_file_is_asked_for(hub: Hub, store: ModelStore) -> None:
    hub.repositories["o/g"].card = {"license": "gemma"}
    said: list[str] = []

    def say(line: str) -> None:
        assert not hub.paths("HEAD")
        said.append(line)

    resolve_model("o/g:Q4_0", sources={}, store=store, offline=False, say=say)
    assert said == [
        "notice: o/g:Q4_0 is under the licence gemma, which may restrict what it is used for: see the card of o/g; "
        "using the model accepts its terms"
    ]


def test_the_library_is_imported_for_its_own_names_alone(tmp_path: Path) -> None:
    script = f"""\
import json, sys
from pathlib import Path
import mlxcel.plugins.sources.hub, mlxcel.plugins.sources.hub_child, mlxcel.cli.download
from mlxcel.plugins.manager import PluginManager
from mlxcel.resolve import resolve_model
from mlxcel.store import ModelStore
sources = PluginManager.load(only=(), trace=None).model_sources()
resolve_model("tiny", sources=sources, store=ModelStore(Path({str(tmp_path)!r})), offline=False)
print(json.dumps(sorted({{"huggingface_hub", "httpx2", "httpx", "requests"}} & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
