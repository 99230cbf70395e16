"""What a model's name means (docs/spec/clients.md 1.9; test 10 of 1.10, its first half)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from source_doubles import GGUF, WEIGHTS, CountingFetch, no_fetch, register

from mlxcel.errors import CheckpointError, DownloadError, MlxcelError, UnknownModel, UsageError
from mlxcel.resolve import download_model, resolve_model
from mlxcel.store import ModelStore


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_path_comes_before_a_registered_name_and_both_before_the_store(
    store: ModelStore, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = CountingFetch()
    sources = {"tiny": register(monkeypatch, fetch)}
    (elsewhere / "tiny").mkdir()
    found = resolve_model("tiny", sources=sources, store=store, offline=False)
    assert (found.path, found.source, found.stored, fetch.calls) == (Path("tiny"), "path", None, 0)

    (elsewhere / "tiny").rmdir()
    found = resolve_model("tiny", sources=sources, store=store, offline=False)
    assert (found.path, found.name, fetch.calls) == (store.root / "tiny" / GGUF, "tiny", 1)
    assert found.stored == store.get("tiny")
    assert found.source == sources["tiny"].fetch

    # a name whose plugin is gone is still in the store
    assert resolve_model("tiny", sources={}, store=store, offline=False) == found


@pytest.mark.parametrize("offline", [False, True])
def test_a_stored_model_needs_no_network(store: ModelStore, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    store.fetch(register(monkeypatch, CountingFetch()))
    sources = {"tiny": register(monkeypatch, no_fetch)}
    assert resolve_model("tiny", sources=sources, store=store, offline=offline).path.read_bytes() == WEIGHTS
    assert download_model("tiny", sources=sources, store=store, offline=offline).read_bytes() == WEIGHTS


def test_offline_nothing_is_fetched(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"tiny": register(monkeypatch, no_fetch)}
    for act in (resolve_model, download_model):
        with pytest.raises(DownloadError, match=r"not in the model store .* offline") as caught:
            act("tiny", sources=sources, store=store, offline=True)
        assert "-m PATH" in str(caught.value.hint)
    assert not store.root.exists()
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / GGUF).write_bytes(WEIGHTS)
    assert resolve_model("tiny", sources=sources, store=store, offline=True).path == store.root / "tiny" / GGUF


@pytest.mark.parametrize("act", [resolve_model, download_model])
def test_offline_a_model_that_is_made_here_is_made(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, act: Callable[..., object]
) -> None:
    """`tiny`: nothing of it comes over a network, whatever the store holds of it."""
    fetch = CountingFetch()
    sources = {"tiny": attrs.evolve(register(monkeypatch, fetch), bytes=0)}
    act("tiny", sources=sources, store=store, offline=True)
    path = store.root / "tiny" / GGUF
    assert path.read_bytes() == WEIGHTS
    path.write_bytes(b"damaged")
    act("tiny", sources=sources, store=store, offline=True)
    assert (path.read_bytes(), fetch.calls) == (WEIGHTS, 2)


@pytest.mark.parametrize("act", [resolve_model, download_model])
def test_a_notice_is_told_where_a_name_is_fetched(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, act: Callable[..., object]
) -> None:
    sources = {"tiny": attrs.evolve(register(monkeypatch, CountingFetch()), notice="read this")}
    said: list[str] = []
    for _ in range(2):
        act("tiny", sources=sources, store=store, offline=False, say=said.append)
    assert said == ["notice: read this"]


def test_offline_download_takes_what_was_put_there(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / GGUF).write_bytes(WEIGHTS)
    sources = {"tiny": register(monkeypatch, no_fetch)}
    assert download_model("tiny", sources=sources, store=store, offline=True) == store.root / "tiny" / GGUF


def test_a_damaged_model_is_fetched_again_or_named(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = CountingFetch()
    sources = {"tiny": register(monkeypatch, fetch)}
    path = store.fetch(sources["tiny"])
    path.write_bytes(WEIGHTS[:-1])
    for given, offline in ((sources, True), ({}, False), ({}, True)):
        for act in (resolve_model, download_model):
            with pytest.raises(DownloadError, match=f"tiny is damaged: .* {len(WEIGHTS) - 1} bytes"):
                act("tiny", sources=given, store=store, offline=offline)
    assert resolve_model("tiny", sources=sources, store=store, offline=False).path.read_bytes() == WEIGHTS
    assert fetch.calls == 2


def test_download_reads_every_byte(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.fetch(register(monkeypatch, CountingFetch()))
    path.write_bytes(WEIGHTS[::-1])
    with pytest.raises(DownloadError, match="SHA-256"):
        download_model("tiny", sources={}, store=store, offline=False)


def test_force_contradicts_offline_and_needs_a_source(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"tiny": register(monkeypatch, CountingFetch())}
    with pytest.raises(UsageError, match=r"--force .*--offline"):
        download_model("tiny", sources=sources, store=store, offline=True, force=True)
    store.fetch(sources["tiny"])
    with pytest.raises(UsageError, match="no plugin registers it"):
        download_model("tiny", sources={}, store=store, offline=False, force=True)


# --- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["model.gguf", "folder", "folder/", "./model.gguf", "."])
def test_an_existing_path_is_read_in_place(store: ModelStore, elsewhere: Path, path: str) -> None:
    (elsewhere / "model.gguf").write_bytes(b"")
    (elsewhere / "folder").mkdir()
    found = resolve_model(path, sources={}, store=store, offline=True)
    assert found.path == Path(path)
    assert found.name == {"folder/": "folder", "folder": "folder", ".": "working"}.get(path, "model")


@pytest.mark.parametrize("name", ["w.bin", "w.pt", "w.pth", "w.ckpt", "w.pkl", "w.pickle", "W.BIN", "w.Pt"])
@pytest.mark.parametrize("exists", [True, False])
def test_pickles_are_refused_without_being_opened(
    store: ModelStore, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str, exists: bool
) -> None:
    def refuse(path: object, *_: object, **__: object) -> None:
        assert name not in os.fspath(path).split("/")[-1], "the file was opened"  # type: ignore[call-overload]
        raise FileNotFoundError(path)

    if exists:
        (elsewhere / name).write_bytes(b"")
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", refuse)
        patched.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError) as caught:
            resolve_model(name, sources={}, store=store, offline=True)
    assert name in caught.value.message
    assert "convert" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tny", ["no model is called 'tny'", "did you mean tiny?"]),
        ("", ["no model is called ''", "known names: other, tiny"]),
        ("something-else-entirely", ["known names: other, tiny"]),
        ("folder/absent.gguf", ["does not exist"]),
        ("folder/absent.safetensors", ["does not exist"]),
        ("./absent", ["does not exist"]),
        ("/absent/folder", ["does not exist"]),
        ("absent.gguf", ["does not exist"]),
        ("../tiny", ["does not exist"]),
        ("..\0", ["no model is called"]),
        ("x" * 5000, ["no model is called"]),
    ],
)
def test_an_unknown_name_is_exit_2_with_the_next_step(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    store.fetch(register(monkeypatch, CountingFetch(), "other"))
    sources = {"tiny": register(monkeypatch, no_fetch)}
    for act in (resolve_model, download_model):
        with pytest.raises(UnknownModel) as caught:
            act(name, sources=sources, store=store, offline=False)
        error: MlxcelError = caught.value
        assert error.exit_code == 2
        for word in words:
            assert word in f"{error.message} {error.hint}"


def test_a_path_is_no_name_to_download(store: ModelStore, elsewhere: Path) -> None:
    (elsewhere / "model.gguf").write_bytes(b"")
    with pytest.raises(UnknownModel):
        download_model("model.gguf", sources={}, store=store, offline=False)
