"""The model store: whole models only, fetched once, removable only when idle (docs/spec/clients.md 1.8 and 1.9)."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import attrs
import pytest
from source_doubles import GGUF, LICENCE, WEIGHTS, CountingFetch, Recorder, files_under, no_fetch, register, sha256

from mlxcel.core.source import ModelFile, ModelSource, Progress
from mlxcel.errors import DownloadError, PluginError, UnknownModel, UsageError
from mlxcel.store import ModelStore, StoredFile, store_root
from mlxcel.store.record import RECORD, file_quantisation, format_bytes


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "deep" / "store")


@pytest.mark.parametrize(
    ("values", "root"),
    [
        (("/m", "/c", "/x"), "/m"),
        ((None, "/c", "/x"), "/c/models"),
        ((None, None, "/x"), "/x/mlxcel/models"),
        ((None, None, None), "/home/me/.cache/mlxcel/models"),
        (("", "", ""), "/home/me/.cache/mlxcel/models"),
        ((None, None, "relative"), "/home/me/.cache/mlxcel/models"),
    ],
)
def test_the_root_is_the_first_that_is_set(values: tuple[str | None, str | None, str | None], root: str) -> None:
    assert store_root(*values, lambda: Path("/home/me")) == Path(root)


def test_a_relative_models_dir_is_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_root("here", None, None, lambda: Path("/home/me")) == tmp_path / "here"


# --- fetching -----------------------------------------------------------------------------------------------------


def test_a_fetched_model_is_listed_with_its_files(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = register(monkeypatch, CountingFetch())
    assert store.list() == []
    path = store.fetch(source)
    [model] = store.list()
    assert model == store.get("tiny")
    assert (model.path, model.format, model.quantisation) == (path, "gguf", "Q4_1")
    assert (model.name, model.license, model.source) == ("tiny", "MIT", source.fetch)
    assert model.fetched.endswith("+00:00")
    assert model.files == (
        StoredFile("LICENSE", len(LICENCE), sha256(LICENCE)),
        StoredFile(GGUF, len(WEIGHTS), sha256(WEIGHTS)),
    )
    assert model.size == len(WEIGHTS) + len(LICENCE)
    assert files_under(store.root) == [".locks/tiny", "tiny/LICENSE", f"tiny/{RECORD}", f"tiny/{GGUF}"]


def test_a_model_of_several_files_is_its_folder(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(target: Path, progress: Progress) -> None:
        (target / "weights").mkdir()
        (target / "weights" / "a.safetensors").write_bytes(b"a")
        (target / "config.json").write_bytes(b"{}")

    base = register(monkeypatch, fetch)
    files = (ModelFile("weights/a.safetensors", sha256(b"a")), ModelFile("config.json", sha256(b"{}")))
    source = ModelSource("tiny", "", 2, "MIT", files, base.fetch)
    assert store.fetch(source) == store.root / "tiny"
    [model] = store.list()
    assert (model.format, model.quantisation) == ("safetensors", None)


def test_what_is_there_is_verified_and_not_fetched_again(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = CountingFetch()
    source = register(monkeypatch, fetch)
    path = store.fetch(source)
    progress = Recorder()
    assert store.fetch(source, progress) == path
    assert progress.phases == [("verify", len(WEIGHTS) + len(LICENCE), [len(LICENCE), len(WEIGHTS) + len(LICENCE)])]
    assert fetch.calls == 1
    store.fetch(source, force=True)
    assert fetch.calls == 2


@pytest.mark.parametrize("harm", ["one bit", "shorter", "gone"])
def test_a_damaged_model_is_fetched_again(store: ModelStore, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    fetch = CountingFetch()
    source = register(monkeypatch, fetch)
    path = store.fetch(source)
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(WEIGHTS[:-1] + (b"\0" if harm == "one bit" else b""))
    model = store.get("tiny")
    assert model is not None
    assert (model.damage() is None) == (harm == "one bit")
    assert GGUF in str(store.verify(model))
    store.fetch(source)
    assert (fetch.calls, path.read_bytes()) == (2, WEIGHTS)


def test_a_source_of_new_hashes_is_fetched_again(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.fetch(register(monkeypatch, CountingFetch()))
    base = register(monkeypatch, CountingFetch(b"new"))
    path = store.fetch(ModelSource("tiny", "", 3, "MIT", (ModelFile(GGUF, sha256(b"new")),), base.fetch))
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("delivered", [WEIGHTS[:-1], b"", None])
def test_a_wrong_or_missing_file_leaves_nothing(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, delivered: bytes | None
) -> None:
    fetch = CountingFetch(delivered) if delivered is not None else (lambda target, progress: None)
    with pytest.raises(DownloadError) as caught:
        store.fetch(register(monkeypatch, fetch))
    assert GGUF in caught.value.message
    if delivered is not None:
        assert sha256(delivered) in caught.value.message
        assert sha256(WEIGHTS) in caught.value.message
    assert files_under(store.root) == [".locks/tiny"]
    assert store.list() == []


def test_a_failed_fetch_keeps_the_model_that_was_there(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.fetch(register(monkeypatch, CountingFetch()))
    with pytest.raises(DownloadError):
        store.fetch(register(monkeypatch, CountingFetch(b"wrong")), force=True)
    assert path.read_bytes() == WEIGHTS


def test_a_failure_names_three_ways_on(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(target: Path, progress: Progress) -> None:
        raise DownloadError("the index is away", hint="wait for it", obtain="`get it` elsewhere")

    with pytest.raises(DownloadError, match="the index is away") as caught:
        store.fetch(register(monkeypatch, fetch))
    hint = str(caught.value.hint)
    assert hint.startswith("wait for it; or ")
    for way in (f"put {GGUF} into {store.root / 'tiny'}", "`get it` elsewhere", "-m PATH", "MLXCEL_MODELS_DIR"):
        assert way in hint
    assert "\n" not in hint


def test_an_interrupted_fetch_leaves_nothing(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(target: Path, progress: Progress) -> None:
        (target / GGUF).write_bytes(WEIGHTS[:100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.fetch(register(monkeypatch, fetch))
    assert files_under(store.root) == [".locks/tiny"]


# --- a licence that asks something --------------------------------------------------------------------------------


def test_a_notice_is_told_before_the_fetch_and_only_then(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    counting = CountingFetch()

    def fetch(target: Path, progress: Progress) -> None:
        order.append("fetched")
        counting(target, progress)

    source = attrs.evolve(register(monkeypatch, fetch), notice="read https://terms.example first")
    store.fetch(source, say=order.append)
    assert order == ["notice: read https://terms.example first", "fetched"]
    store.fetch(source, say=order.append)
    assert len(order) == 2
    store.fetch(source, force=True, say=order.append)
    assert order == ["notice: read https://terms.example first", "fetched"] * 2


def test_files_put_there_by_hand_need_no_notice(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = attrs.evolve(register(monkeypatch, no_fetch), notice="read this")
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / GGUF).write_bytes(WEIGHTS)
    said: list[str] = []
    store.fetch(source, say=said.append)
    assert said == []


# --- a disk that does not do --------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_written_is_told_before_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(DownloadError, match="cannot be written") as caught:
            ModelStore(root).fetch(register(monkeypatch, no_fetch))
        assert str(root) in caught.value.message


def test_a_read_only_disk_is_told_before_the_network(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    source = register(monkeypatch, no_fetch)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", mkdir)
        with pytest.raises(DownloadError, match=r"cannot be written: .*Read-only file system"):
            store.fetch(source)


def test_a_stored_model_on_a_read_only_disk_is_used(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.fetch(register(monkeypatch, CountingFetch()))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    source = register(monkeypatch, no_fetch)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        assert store.fetch(source) == path
        store.use("tiny").close()


def test_too_small_a_disk_is_told_before_the_network(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = register(monkeypatch, no_fetch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 8001, 999))
    with pytest.raises(DownloadError, match=r"too full: 999 B free, 1\.0 kB needed"):
        store.fetch(source)


def test_a_disk_that_fills_up_has_its_sentence(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(target: Path, progress: Progress) -> None:
        (target / GGUF).write_bytes(WEIGHTS[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target / GGUF))

    with pytest.raises(DownloadError, match=f"disk of the model store {store.root} is full"):
        store.fetch(register(monkeypatch, fetch))
    assert files_under(store.root) == [".locks/tiny"]


def test_a_network_fault_of_a_plugin_is_no_disk_fault(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(target: Path, progress: Progress) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    with pytest.raises(DownloadError, match=r"tiny could not be fetched: .*Connection refused"):
        store.fetch(register(monkeypatch, fetch))


def test_a_source_whose_code_is_gone_is_a_plugin_error(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    good = register(monkeypatch, CountingFetch())
    for target in ("no_such_module:fetch", good.fetch.replace("fetch", "absent")):
        with pytest.raises(PluginError, match="does not load"):
            store.fetch(ModelSource("tiny", "", 1, "MIT", good.files, target))


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "../a", "a\0b", "x" * 129])
def test_a_source_must_stay_in_its_folder(store: ModelStore, name: str) -> None:
    file = ModelFile(GGUF, sha256(WEIGHTS))
    with pytest.raises(PluginError):
        store.fetch(ModelSource(name, "", 1, "MIT", (file,), "x:y"))
    if name:
        with pytest.raises(PluginError):
            store.fetch(ModelSource("fine", "", 1, "MIT", (file, ModelFile(f"../{name}", "0")), "x:y"))


# --- files put there by hand --------------------------------------------------------------------------------------


def test_files_put_there_by_hand_are_adopted(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = register(monkeypatch, no_fetch)
    assert store.adopt(source) is None
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / GGUF).write_bytes(WEIGHTS)
    assert store.fetch(source) == store.root / "tiny" / GGUF
    assert store.fetch(source) == store.root / "tiny" / GGUF


def test_wrong_files_put_there_by_hand_are_refused_and_kept(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = register(monkeypatch, no_fetch)
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / GGUF).write_bytes(b"half")
    for act in (store.adopt, store.fetch):
        with pytest.raises(DownloadError, match=sha256(b"half")):
            act(source)
    assert (store.root / "tiny" / GGUF).read_bytes() == b"half"


def test_a_folder_of_the_users_own_is_never_replaced(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / "thesis.txt").write_bytes(b"years")
    for force in (False, True):
        with pytest.raises(DownloadError, match="in the way"):
            store.fetch(register(monkeypatch, no_fetch), force=force)
    assert (store.root / "tiny" / "thesis.txt").read_bytes() == b"years"


# --- the record ---------------------------------------------------------------------------------------------------


def test_a_folder_without_a_record_is_no_model(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.fetch(register(monkeypatch, CountingFetch()))
    (store.root / "tiny" / RECORD).unlink()
    assert store.list() == []
    assert store.get("tiny") is None


GOOD = {
    "name": "tiny",
    "source": "s",
    "license": "MIT",
    "fetched": "t",
    "files": [{"name": "a", "size": 1, "sha256": "0"}],
}


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        json.dumps(GOOD | {"name": "other"}).encode(),
        json.dumps(GOOD | {"license": None}).encode(),
        json.dumps(GOOD | {"revision": 7}).encode(),
        json.dumps(GOOD | {"files": []}).encode(),
        json.dumps(GOOD | {"files": [{"name": "../../etc/passwd", "size": 1, "sha256": "0"}]}).encode(),
        json.dumps(GOOD | {"files": [{"name": "/etc/passwd", "size": 1, "sha256": "0"}]}).encode(),
        json.dumps(GOOD | {"files": [{"name": "a", "size": -1, "sha256": "0"}]}).encode(),
        json.dumps(GOOD | {"files": [{"name": "a", "size": True, "sha256": "0"}]}).encode(),
        json.dumps(GOOD | {"files": ["a"]}).encode(),
    ],
)
def test_a_record_that_cannot_be_believed_is_none(store: ModelStore, record: bytes) -> None:
    (store.root / "tiny").mkdir(parents=True)
    (store.root / "tiny" / RECORD).write_text(json.dumps(GOOD))
    assert store.get("tiny") is not None
    (store.root / "tiny" / RECORD).write_bytes(record)
    assert store.get("tiny") is None
    assert store.list() == []


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("llama-3-8b-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-3-70b-Q4_K_M-00001-of-00002.gguf", "Q4_K_M"),
        ("x.IQ2_XXS.gguf", "IQ2_XXS"),
        ("gemma-3-270m-it-bf16.gguf", "BF16"),
        ("x.F16.gguf", "F16"),
        ("qwen3-0.6b.gguf", None),
        ("model.safetensors", None),
    ],
)
def test_quantisation_as_the_name_tells_it(name: str, quantisation: str | None) -> None:
    assert file_quantisation([name]) == quantisation


@pytest.mark.parametrize(
    ("config", "quantisation"),
    [
        (b'{"dtype": "bfloat16"}', "bfloat16"),
        (b'{"torch_dtype": "float16"}', "float16"),
        (b'{"dtype": "float32", "torch_dtype": "float16"}', "float32"),
        (b"{}", None),
        (b"[]", None),
        (b"\xff", None),
        (b'{"dtype": 7}', None),
        (b'{"dtype": "a\\u001b[31mb"}', None),
    ],
)
def test_quantisation_of_a_folder_as_its_config_declares_it(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, config: bytes, quantisation: str | None
) -> None:
    def fetch(target: Path, progress: Progress) -> None:
        (target / "model.safetensors").write_bytes(b"a")
        (target / "config.json").write_bytes(config)

    files = (ModelFile("model.safetensors", sha256(b"a")), ModelFile("config.json", None))
    store.fetch(ModelSource("tiny", "", 2, "MIT", files, register(monkeypatch, fetch).fetch))
    assert [model.quantisation for model in store.list()] == [quantisation]


def test_bytes_for_people() -> None:
    counts = (0, 999, 1000, 92_871_040, 999_949_999, 999_950_000, 5_000_000_000_000)
    assert [format_bytes(count) for count in counts] == [
        "0 B", "999 B", "1.0 kB", "92.9 MB", "999.9 MB", "1.0 GB", "5.0 TB",
    ]  # fmt: skip


# --- removing and using -------------------------------------------------------------------------------------------


def test_remove_deletes_the_model_alone(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.fetch(register(monkeypatch, CountingFetch()))
    store.fetch(register(monkeypatch, CountingFetch(), "other"))
    store.remove("tiny")
    assert [model.name for model in store.list()] == ["other"]
    assert not (store.root / "tiny").exists()
    assert files_under(store.root / ".tmp") == []


@pytest.mark.parametrize("name", ["absent", "..", ".", "", "tiny/", "../store/tiny", ".locks", "/", "ti\0ny"])
def test_only_a_listed_name_can_be_removed_or_used(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store.fetch(register(monkeypatch, CountingFetch()))
    for act in (store.remove, store.use):
        with pytest.raises(UnknownModel) as caught:
            act(name)
        assert caught.value.exit_code == 2
    with pytest.raises(UnknownModel):
        store.remove(str(store.root / "tiny"))
    assert len(store.list()) == 1


def test_a_model_in_use_is_neither_removed_nor_replaced(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.fetch(register(monkeypatch, CountingFetch()))
    source = register(monkeypatch, no_fetch)
    with store.use("tiny"), store.use("tiny"):
        with pytest.raises(UsageError, match="'tiny' is in use"):
            store.remove("tiny")
        with pytest.raises(UsageError, match="'tiny' is in use"):
            store.fetch(source, force=True)
    assert len(store.list()) == 1
    held = store.use("tiny")
    held.close()
    held.close()
    store.remove("tiny")
    assert store.list() == []


def test_a_linked_model_is_unlinked_and_its_files_kept(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fetch(register(monkeypatch, CountingFetch()))
    (store.root / "tiny").rename(tmp_path / "elsewhere")
    (store.root / "tiny").symlink_to(tmp_path / "elsewhere")
    store.remove("tiny")
    assert store.list() == []
    assert (tmp_path / "elsewhere" / GGUF).read_bytes() == WEIGHTS
