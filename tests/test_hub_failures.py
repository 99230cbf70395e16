"""What can go wrong with a model of Hugging Face: each failure of its library has its own sentence and next step."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import attrs
import pytest
from hub_server import WEIGHTS, Hub, serving_alone, two_repositories
from source_doubles import StepClock, files_under

import mlxcel.plugins.sources.hub as hub_source
from mlxcel.core.source import NoProgress
from mlxcel.errors import CheckpointError, DownloadError, MlxcelError, UnknownModel, UsageError
from mlxcel.plugins.sources import hub_child, hub_failures
from mlxcel.resolve import download_model, resolve_model
from mlxcel.store import HubName, ModelStore


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_alone(two_repositories(), monkeypatch, tmp_path / "hf") as served:
        yield served


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def failing(name: str, store: ModelStore) -> MlxcelError:
    """The error; nothing of the model stays, and the next step is told."""
    with pytest.raises(MlxcelError) as caught:
        resolve_model(name, sources={}, store=store, offline=False)
    assert [path for path in files_under(store.root) if not path.startswith(".locks/")] == []
    assert caught.value.hint
    assert "\n" not in f"{caught.value.message}{caught.value.hint}"
    return caught.value


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
        ((403, {"X-Error-Code": "GatedRepo"}), DownloadError, "o/n is gated", "ask for access"),
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
    resolve_model("o/g:Q4_0", sources={}, store=store, offline=False)
    with pytest.raises(UnknownModel) as caught:
        resolve_model("o/gg:Q4_0", sources={}, store=store, offline=False)
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
        (Answered(401), "missing"),
        (Answered(403), "gated"),
        (Answered(404), "missing"),
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


KINDS = {*hub_child.FAILURES.values(), *hub_child.STATUSES.values(), *("server", "full", "network", "absent", "other")}


def test_every_kind_of_failure_has_its_own_sentence() -> None:
    told = [hub_failures.failure(kind, "{words} of it", HubName("o", "n", "v")) for kind in sorted({*KINDS, "stalled"})]
    assert len({error.message for error in told}) == len(told)
    assert all(error.hint for error in told)


def test_words_are_one_line_without_signatures() -> None:
    assert hub_child.words(Answered(418)) == "Answered: 418 for https://cdn.example/x twice Request ID: 7"
    assert len(hub_child.words(ValueError("x" * 5000))) < 500
