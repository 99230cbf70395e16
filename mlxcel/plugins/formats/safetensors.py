"""A folder as Hugging Face holds it: config.json, safetensors shards, tokenizer and template files.

Pickled weights are refused by name and never opened: reading a pickle runs code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import attrs

from mlxcel.core.checkpoint import TensorInfo
from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.detect import PICKLE_SUFFIXES
from mlxcel.plugins.formats.floats import dominant_type
from mlxcel.plugins.formats.json_file import MAX_BYTES, read_json_object
from mlxcel.plugins.formats.refusals import refuse_packed, refuse_quantised
from mlxcel.plugins.formats.shard_index import choose_shards
from mlxcel.plugins.formats.text_tower import find_tower, text_model_config

if TYPE_CHECKING:
    import numpy as np

    from mlxcel.plugins.formats.safetensors_shard import Shard

log = logging.getLogger(__name__)

JSON_ASSETS: Final = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.json",
)


class SafetensorsCheckpoint:
    """A `Checkpoint` over the safetensors shards of a folder; F32, F16 and BF16 tensors can be read.

    Which files count: an index whose every tensor is where it says is obeyed and other files are ignored; without such
    an index all `*.safetensors` of the folder are taken together, and a tensor that lies in two of them is an error.
    Of a multimodal wrapper the text model is seen as if it lay there alone, the other tensors under their own names.
    Raises CheckpointError for a missing or damaged config.json, a damaged or missing shard, quantised weights, a model
    that is no decoder, and pickled weights.
    """

    format = "safetensors"
    naming = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_single_file(path)
        shards = shard_files(path)
        if not shards:
            refuse_without_shards(path)
        config = text_model_config(read_config(path), str(path / "config.json"))
        self.config: Mapping[str, Any] = MappingProxyType(config)
        model_type = self.config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise CheckpointError(
                f"{path / 'config.json'}: model_type is {model_type!r}, it must name the model's family",
                hint="take the config.json that belongs to the weights",
            )
        self.architecture: str = model_type
        refuse_quantised(path, self.config)
        found = choose_shards(path, shards, config)
        tower = find_tower(found, config, str(path))
        self._own = tower.seen_names(found, str(path))
        if tower.is_moved:
            log.info("%s: the text model lies under %r, and is read as if under 'model.'", path, tower.root)
        self._shards: dict[str, Shard] | None = found
        infos = {seen: found[own].tensors[own] for seen, own in self._own.items()}
        if tower.is_moved:
            infos = {seen: attrs.evolve(info, name=seen) for seen, info in infos.items()}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)
        refuse_packed(path, {seen: self.tensors[seen] for seen, own in self._own.items() if tower.holds(own)})
        self.assets: Mapping[str, Any] = MappingProxyType(read_assets(path))

    @property
    def quantisation(self) -> str:
        return dominant_type(self.tensors)

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        if self._shards is None:
            raise ValueError(f"{self.path} is closed")
        own = self._own[name]
        return self._shards[own].read(own, out)

    def close(self) -> None:
        self._shards = None  # each map goes with its last view


def refuse_single_file(path: Path) -> None:
    """A weight file given in place of its folder."""
    if not path.is_file():
        return
    if path.suffix.lower() in PICKLE_SUFFIXES:
        refuse_pickles(path.parent, [path.name])
    raise CheckpointError(
        f"{path} is one file of a checkpoint, its config.json and tokenizer are needed too",
        hint=f"give the folder instead: {path.parent}",
    )


def shard_files(folder: Path) -> list[Path]:
    """Sorted by name, whatever the suffix's case. Hidden files are other programs' leavings, macOS's `._` for one."""
    return sorted(
        child for child in folder.iterdir() if child.suffix.lower() == ".safetensors" and not child.name.startswith(".")
    )


def refuse_without_shards(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder with a checkpoint in it", hint="check the path")
    pickles = sorted(child.name for child in path.iterdir() if child.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        refuse_pickles(path, pickles)
    raise CheckpointError(
        f"{path} holds no *.safetensors file",
        hint="download the weights into this folder, or give a .gguf file",
    )


def refuse_pickles(folder: Path, names: list[str]) -> None:
    shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
    raise CheckpointError(
        f"{folder} holds pickled weights only ({shown}), which are never opened: reading a pickle runs code",
        hint="convert them where you trust them: load the state dict with torch.load(..., weights_only=True), then "
        "safetensors.torch.save_file; or take a repository with .safetensors or .gguf files",
    )


def read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} has weights and no config.json",
            hint="download the config.json that belongs to the weights into the same folder",
        )
    return read_json_object(path / "config.json")


def read_assets(path: Path) -> dict[str, Any]:
    """Everything beside the weights, under the keys of `Checkpoint.assets`."""
    assets: dict[str, Any] = {name: read_json_object(path / name) for name in JSON_ASSETS if (path / name).is_file()}
    assets |= {name: path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()}
    template = path / "chat_template.jinja"
    if template.is_file():
        if template.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{template} has {template.stat().st_size} bytes, at most {MAX_BYTES} are taken")
        try:
            assets["chat_template.jinja"] = template.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{template} is not UTF-8: {error.reason} at byte {error.start}") from error
    return assets
