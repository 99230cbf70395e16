"""A model in the store, as its `mlxcel-model.json` tells it (docs/spec/clients.md 1.9)."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from mlxcel.store.hub_name import HubName

RECORD = "mlxcel-model.json"
_RECORD_LIMIT = 16 << 20  # bytes; a record names files, so one beyond this is damaged
_FORMATS = {".gguf": "gguf", ".safetensors": "safetensors"}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_QUANTISATION = re.compile(
    r"[.-]((?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE
)


@attrs.frozen
class StoredFile:
    """A file of a stored model: its path inside the model's folder, bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@attrs.frozen
class StoredModel:
    """What the store knows of a model. `fetched` is the time in UTC, ISO 8601; `revision` the commit, where there is
    one."""

    name: str
    folder: Path
    source: str
    license: str
    fetched: str
    files: tuple[StoredFile, ...]
    revision: str | None = None

    @property
    def path(self) -> Path:
        """What is loaded: the one GGUF file where the model is one, else the folder."""
        weights = [file.name for file in self.files if file.name.endswith(".gguf")]
        return self.folder / weights[0] if len(weights) == 1 else self.folder

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files)

    @property
    def format(self) -> str | None:
        return file_format(file.name for file in self.files)

    @property
    def quantisation(self) -> str | None:
        """As the name of a GGUF file tells it, or the type that config.json declares."""
        told = file_quantisation(file.name for file in self.files)
        if told is None and any(file.name == "config.json" for file in self.files):
            return _declared_type(self.folder / "config.json")
        return told

    def damage(self) -> str | None:
        """What is wrong with its files by name and size alone, without reading them; None: nothing."""
        for file in self.files:
            try:
                size = (self.folder / file.name).stat().st_size
            except OSError as error:
                return f"{self.folder / file.name}: {error.strerror}"
            if size != file.size:
                return f"{self.folder / file.name} has {size} bytes, {file.size} were stored"
        return None


def folder_of(name: str) -> str | None:
    """The folder in the store of a model of this name; None for what can be no name there."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    hub = HubName.parse(name)
    return hub.folder if hub is not None and hub.text == name else None


def file_format(names: Iterable[str]) -> str | None:
    """The weights' format, by the files' suffixes."""
    return next((_FORMATS[suffix] for name in names if (suffix := Path(name).suffix) in _FORMATS), None)


def file_quantisation(names: Iterable[str]) -> str | None:
    """The weights' quantisation as a GGUF file's name tells it by convention ("x.Q4_1.gguf" -> "Q4_1")."""
    return next((found[1].upper() for name in names if (found := _QUANTISATION.search(name))), None)


def _declared_type(path: Path) -> str | None:
    config = _read_json(path)
    found = (config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
    return found if isinstance(found, str) and found.isidentifier() and len(found) <= 32 else None


def write_record(model: StoredModel) -> None:
    """Puts the record into `model.folder`: whole or not at all, also where the machine stops in between."""
    text = json.dumps(
        {
            "name": model.name,
            "source": model.source,
            "license": model.license,
            "fetched": model.fetched,
            "revision": model.revision,
            "files": [attrs.asdict(file) for file in model.files],
        },
        indent=2,
    )
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=model.folder)
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), 0o644)  # mkstemp's 0600 would hide a shared store's models from the others
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, model.folder / RECORD)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_record(folder: Path) -> StoredModel | None:
    """The model in `folder`; None where there is no record, or none that can be believed."""
    return _structure(_read_json(folder / RECORD), folder)


def _read_json(path: Path) -> Any:
    """None for what is not there, too large, or no JSON."""
    try:
        with open(path, "rb") as stream:
            text = stream.read(_RECORD_LIMIT + 1)
        return json.loads(text) if len(text) <= _RECORD_LIMIT else None
    except (OSError, ValueError, RecursionError):
        return None


def _structure(raw: Any, folder: Path) -> StoredModel | None:
    texts = ("name", "source", "license", "fetched")
    if not isinstance(raw, dict) or not all(isinstance(raw.get(key), str) for key in texts):
        return None
    files, revision = raw.get("files"), raw.get("revision")
    if folder_of(raw["name"]) != folder.name or not isinstance(revision, str | None):
        return None
    if not isinstance(files, list) or not files or not all(map(_is_file, files)):
        return None
    stored = tuple(StoredFile(file["name"], file["size"], file["sha256"]) for file in files)
    return StoredModel(raw["name"], folder, raw["source"], raw["license"], raw["fetched"], stored, revision)


def _is_file(raw: Any) -> bool:
    if not isinstance(raw, dict) or not all(isinstance(raw.get(key), str) for key in ("name", "sha256")):
        return False
    # The record is only believed about its own folder.
    inside = is_inside(raw["name"])
    return inside and isinstance(raw.get("size"), int) and not isinstance(raw["size"], bool) and raw["size"] >= 0


def is_inside(name: str) -> bool:
    """Whether a file's name stays inside the folder it is meant for."""
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")


def format_bytes(count: int) -> str:
    """Bytes for people, in powers of 1000 as package indexes count them: 92871040 -> "92.9 MB"."""
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
