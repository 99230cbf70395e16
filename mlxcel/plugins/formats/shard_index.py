"""Which of a folder's safetensors files make up the checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.json_file import read_json_object
from mlxcel.plugins.formats.safetensors_shard import Shard, open_shard
from mlxcel.plugins.formats.text_tower import find_tower, is_whole

log = logging.getLogger(__name__)

INDEX: Final = "model.safetensors.index.json"
NUMBERED: Final = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
MAX_DIGITS: Final = 5  # what the naming has


def choose_shards(folder: Path, files: Sequence[Path], config: Mapping[str, Any]) -> dict[str, Shard]:
    """Tensor name to the shard that holds it. `files` are all `*.safetensors` of the folder, `config` config.json's.

    A complete index (each tensor lies in the file it names) is obeyed, and files it does not name are not opened. An
    index that is not complete is stale: all files are taken together, and every tensor it names that the text model
    needs must turn up once. Without an index, a gap in numbered files is an error unless the others hold everything.
    Raises CheckpointError that names the missing files, or both files of a tensor that lies in two.
    """
    weight_map = read_weight_map(folder)
    if weight_map is None:
        found = merge([open_shard(file) for file in files])
        refuse_gaps(folder, [file.name for file in files], found, config)
        return found
    present = {file.name: file for file in files}
    missing = sorted(set(weight_map.values()) - set(present))
    opened = {name: open_shard(present[name]) for name in sorted(set(weight_map.values()) & set(present))}
    if weight_map and not missing and all(tensor in opened[file].tensors for tensor, file in weight_map.items()):
        named = {tensor: opened[file] for tensor, file in weight_map.items()}
        unnamed = merge(list(opened.values()), ignore=named)
        return {**named, **unnamed}
    opened |= {name: open_shard(file) for name, file in present.items() if name not in opened}
    found = merge([opened[name] for name in sorted(opened)])
    refuse_lost(folder, weight_map, found, missing, config)
    return found


def refuse_lost(
    folder: Path,
    weight_map: Mapping[str, str],
    found: Mapping[str, Shard],
    missing: Sequence[str],
    config: Mapping[str, Any],
) -> None:
    """A stale index may name other towers, or tensors by an older spelling; what the text model needs must be there."""
    where = str(folder)
    here = find_tower(found, config, where).seen_names(found, where)
    needed = find_tower(weight_map, config, str(folder / INDEX)).needed(weight_map, config)
    lost = sorted(own for own, seen in needed.items() if own not in found and seen not in here)
    if lost:
        raise CheckpointError(
            f"{folder / INDEX} names {len(weight_map)} tensors, {len(lost)} of them are in no file here, "
            f"{lost[0]!r} for one; missing files: {_few(missing) if missing else 'none of the files it names'}",
            hint="download the missing files, or the index that belongs to these files",
        )
    if missing:
        log.warning("%s: the index names files that are not there, and the text model needs none: %s", folder, missing)


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name, or None without an index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor names to file names")
    outside = next((file for file in weight_map.values() if Path(file).name != file), None)
    if outside is not None:
        raise CheckpointError(f"{path} names {outside!r}, which is not a plain file name")
    return weight_map


def merge(shards: Sequence[Shard], ignore: Mapping[str, Shard] | None = None) -> dict[str, Shard]:
    """All tensors of the shards but the ignored ones. One that lies in two shards is refused: which is right?"""
    merged: dict[str, Shard] = {}
    for shard in shards:
        for name in shard.tensors:
            if ignore is not None and name in ignore:
                continue
            if name in merged:
                raise CheckpointError(
                    f"tensor {name!r} lies in two files, {merged[name].path} and {shard.path.name}",
                    hint="remove the file that does not belong to the checkpoint, or give it a complete "
                    f"{INDEX} that names the right one",
                )
            merged[name] = shard
    return merged


def refuse_gaps(folder: Path, names: Sequence[str], found: Mapping[str, Shard], config: Mapping[str, Any]) -> None:
    """Numbered shards ("-00001-of-00003") tell by themselves when one is missing."""
    present = set(names)
    for stem, number, count in {match.groups() for match in map(NUMBERED.fullmatch, names) if match is not None}:
        if len(count) > MAX_DIGITS or len(number) > MAX_DIGITS:
            continue  # no count of shards
        wanted = (f"{stem}-{i:0{len(number)}d}-of-{count}.safetensors" for i in range(1, int(count) + 1))
        missing = [name for name in wanted if name not in present]
        if missing and not is_whole(find_tower(found, config, str(folder)).seen_names(found, str(folder)), config):
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {int(count)} shards: {_few(missing)}",
                hint="download the missing files",
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
