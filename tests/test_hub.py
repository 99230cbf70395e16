"""Models of Hugging Face, by its own library against a hub on loopback (docs/spec/clients.md 1.9; tests 9, 10)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import attrs
import pytest
from hub_server import COMMIT, Hub, Repository, serving, sha256
from source_doubles import Recorder, StepClock, files_under

import mlxcel.plugins.sources.hub as hub_source
from mlxcel.core.source import NoProgress
from mlxcel.errors import CheckpointError, DownloadError, MlxcelError, UnknownModel, UsageError
from mlxcel.plugins.sources import hub_child
from mlxcel.resolve import ResolvedModel, download_model, resolve_model
from mlxcel.store import HubName, ModelStore

WEIGHTS = bytes(range(256)) * 3000
SAFETENSORS = {
    "model.safetensors": WEIGHTS,
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "LICENSE": b"Permission is granted.\n",
    "README.md": b"# n\n",
    "pytorch_model.bin": b"\x80\x04evil",
}
GGUFS = {"m-Q8_0.gguf": WEIGHTS, "m-Q4_0.gguf": WEIGHTS[:1000], "LICENSE": b"l"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))]:
        monkeypatch.delenv(name)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    repositories = {"o/n": Repository(SAFETENSORS), "o/g": Repository(GGUFS)}
    with serving(repositories) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield served


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def resolve(name: str, store: ModelStore, *, offline: bool = False, progress: Recorder | None = None) -> ResolvedModel:
    return resolve_model(name, sources={}, store=store, offline=offline, progress=progress)


def failing(name: str, store: ModelStore) -> MlxcelError:
    """The error; nothing of the model stays, and the next step is told."""
    with pytest.raises(MlxcelError) as caught:
        resolve(name, store)
    assert [path for path in files_under(store.root) if not path.startswith(".locks/")] == []
    assert caught.value.hint
    assert "\n" not in f"{caught.value.message}{caught.value.hint}"
    return caught.value


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


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"license": "mit"}, None),
        ({"license": "gemma"}, "licence 'gemma'"),
        (
            {"license": "other", "license_name": "tongyi", "license_link": "https://licence.example"},
            "licence 'tongyi', which may restrict what it is used for: see https://licence.example",
        ),
        ({}, "names no licence"),
    ],
)
def test_a_licence_that_may_ask_something_has_a_notice(hub: Hub, card: dict[str, object], words: str | None) -> None:
    hub.repositories["o/g"].card = card
    notice = hub_source.Hub().find(HubName("o", "g", choice="Q4_0")).notice
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
        "notice: o/g:Q4_0 is under the licence 'gemma', which may restrict what it is used for: see the card of o/g; "
        "using the model accepts its terms"
    ]


# --- what can go wrong --------------------------------------------------------------------------------------------


def test_a_choice_is_asked_for_before_a_file_is_fetched(hub: Hub, store: ModelStore) -> None:
    error = failing("o/g", store)
    assert isinstance(error, UsageError)
    assert "m-Q4_0.gguf (1.0 kB), m-Q8_0.gguf (768.0 kB)" in error.message
    assert hub.paths("HEAD") == []


def test_pickles_alone_are_never_fetched(hub: Hub, store: ModelStore) -> None:
    hub.repositories["o/n"].files = {"pytorch_model.bin": b"\x80\x04evil", "config.json": b"{}"}
    error = failing("o/n", store)
    assert isinstance(error, CheckpointError)
    assert "pytorch_model.bin" in error.message
    assert hub.paths("HEAD") == []


@pytest.mark.parametrize(
    ("refused", "kind", "words", "step"),
    [
        ((401, {"X-Error-Code": "RepoNotFound"}), UnknownModel, "no model o/n, or not for everybody", "spelling"),
        ((404, {}), UnknownModel, "no model o/n, or not for everybody", "spelling"),
        ((403, {"X-Error-Code": "GatedRepo"}), DownloadError, "o/n is gated", "ask for access"),
        ((401, {"X-Error-Code": "GatedRepo"}), DownloadError, "o/n is gated", "ask for access"),
        ((403, {}), DownloadError, "o/n is gated", "ask for access"),
        ((429, {}), DownloadError, "rate limit", "wait some minutes"),
        ((500, {}), DownloadError, "fails to answer", "try again later"),
    ],
)
def test_each_refusal_has_its_sentence(
    hub: Hub, store: ModelStore, refused: tuple[int, dict[str, str]], kind: type[MlxcelError], words: str, step: str
) -> None:
    hub.repositories["o/n"].refused = refused
    error = failing("o/n", store)
    assert type(error) is kind
    assert words in error.message
    assert step in str(error.hint)


def test_a_gate_may_open_for_the_list_alone(hub: Hub, store: ModelStore) -> None:
    hub.repositories["o/n"].files_refused = (403, {"X-Error-Code": "GatedRepo"})
    error = failing("o/n", store)
    assert "o/n is gated" in error.message
    assert "-m PATH" in str(error.hint)


def test_a_name_that_is_nowhere_lists_near_ones(hub: Hub, store: ModelStore) -> None:
    resolve("o/g:Q4_0", store)
    with pytest.raises(UnknownModel) as caught:
        resolve("o/gg:Q4_0", store)
    assert "did you mean o/g:Q4_0?" in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_an_unknown_revision(hub: Hub, store: ModelStore) -> None:
    error = failing("o/n@v9", store)
    assert isinstance(error, UnknownModel)
    assert "o/n has no revision 'v9'" in error.message


def test_offline_nothing_is_asked(hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for act in (resolve_model, download_model):
        with pytest.raises(DownloadError, match="offline nothing is fetched"):
            act("o/n", sources={}, store=store, offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in failing("o/n", store).message
    assert hub.asked == []


def test_without_a_network_the_error_says_so(hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    error = failing("o/n", store)
    assert "Hugging Face cannot be reached" in error.message
    assert "HF_ENDPOINT" in str(error.hint)


def test_a_python_without_the_library_is_told_how_to_get_it(
    hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = hub_source.Hub(command=(sys.executable, "-I", "-S", hub_child.__file__))
    monkeypatch.setattr(hub_source, "Hub", lambda: bare)
    assert "pip install huggingface-hub" in str(failing("o/n", store).hint)


@pytest.mark.parametrize(
    ("file", "sent"),
    [
        ("model.safetensors", WEIGHTS[::-1]),
        ("model.safetensors", WEIGHTS[:-1]),
        ("config.json", b'{"model_type": "lllll"}'),
    ],
)
def test_another_file_than_the_listed_one_is_refused(hub: Hub, store: ModelStore, file: str, sent: bytes) -> None:
    hub.repositories["o/n"].served = {file: sent}
    assert isinstance(failing("o/n", store), DownloadError)


def test_too_small_a_disk_is_told_before_a_file_is_fetched(
    hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 8001, 999))
    assert "too full: 999 B free, 768.0 kB needed" in failing("o/g:Q8_0", store).message
    assert hub.paths("HEAD") == []


def test_a_stalled_hub_is_ended_after_120_seconds(
    hub: Hub, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.goes_on, gate = threading.Event(), tmp_path / "stalled"
    hub.on_stall = gate.touch
    clock = StepClock(gate, 40.0)
    watched = hub_source.Hub(clock=clock)
    monkeypatch.setattr(hub_source, "Hub", lambda: watched)
    assert "no new byte came for 120 s" in failing("o/n", store).message
    assert clock.time >= 120


def test_ctrl_c_ends_the_library_and_leaves_nothing(hub: Hub, store: ModelStore, tmp_path: Path) -> None:
    hub.goes_on, stalled = threading.Event(), threading.Event()
    hub.on_stall = stalled.set

    class Interrupted(NoProgress):
        def advance(self, done: int) -> None:
            if stalled.is_set():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model("o/n", sources={}, store=store, offline=False, progress=Interrupted())
    assert files_under(store.root) == [".locks/o--n@main"]
    assert subprocess.run(["pgrep", "-f", str(store.root)], capture_output=True, check=False).stdout == b""


# --- how a failure of the library is told -------------------------------------------------------------------------


class OfflineModeIsEnabled(Exception):
    """Named as the library's own."""


class Answered(Exception):
    """An error that carries what the hub answered."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} for https://cdn.example/x?Signature=secret&Key=1 twice\nRequest ID: 7")
        self.response = attrs.make_class("Response", ["status_code"])(status)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "full"),
        (ConnectionResetError(), "network"),
        (TimeoutError(), "network"),
        (OfflineModeIsEnabled(), "offline"),
        (Answered(429), "rate"),
        (Answered(503), "server"),
        (Answered(418), "other"),
        (ModuleNotFoundError("x", name="huggingface_hub"), "absent"),
        (ModuleNotFoundError("x", name="something"), "other"),
        (URLError("x"), "other"),
        (ValueError(), "other"),
    ],
)
def test_a_failure_is_told_apart_also_inside_another(error: Exception, kind: str) -> None:
    assert hub_child.failure(error) == kind
    outer = RuntimeError("the library failed")
    outer.__cause__ = LookupError()
    outer.__cause__.__context__ = error
    assert hub_child.failure(outer) == kind


def test_words_are_one_line_without_signatures() -> None:
    assert hub_child.words(Answered(418)) == "Answered: 418 for https://cdn.example/x twice Request ID: 7"
    assert len(hub_child.words(ValueError("x" * 5000))) < 500


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
