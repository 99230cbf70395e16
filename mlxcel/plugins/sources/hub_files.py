"""Which files of a repository at Hugging Face make the model: safetensors as a folder, or one GGUF file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

import attrs

from mlxcel.errors import CheckpointError, UsageError
from mlxcel.store.hub_name import HubName
from mlxcel.store.record import RECORD, file_quantisation, format_bytes, is_inside

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LICENCE: Final = re.compile(r"(licen[cs]e|notice|use_policy)([._-].*)?", re.IGNORECASE)
_BESIDE: Final = (".json", ".jinja")
_TOKENIZER: Final = "tokenizer.model"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_NO_MODEL: Final = re.compile(r"(^|[._-])(mmproj|imatrix)", re.IGNORECASE)  # GGUF files that help a model
_SHOWN: Final = 30  # files that an error lists


@attrs.frozen
class HubFile:
    """A file of one commit. `sha256` is known for large files, `blob` (Git's id of the content) for the others."""

    name: str
    size: int
    sha256: str | None
    blob: str | None


def chosen_files(name: HubName, files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """The files to fetch, those of the weights first.

    Raises UsageError where a choice is needed or fits no file, CheckpointError where there is no model that is read.
    """
    files = [file for file in files if is_inside(file.name) and file.name.isprintable() and file.name != RECORD]
    root = [file for file in files if "/" not in file.name]
    licences = [file for file in root if _LICENCE.fullmatch(file.name)]
    ggufs = [file for file in files if file.name.lower().endswith(".gguf") and not _NO_MODEL.search(_last(file))]
    tensors = _tensor_files(root)
    if name.choice is not None:
        return (_one_gguf(name, ggufs), *licences)
    if tensors and any(file.name == "config.json" for file in root):
        beside = [file for file in root if file.name.endswith(_BESIDE) or file.name == _TOKENIZER]
        return (*tensors, *beside, *licences)
    if ggufs:
        return (_one_gguf(name, ggufs), *licences)
    raise _no_model(name, root, tensors)


def _tensor_files(root: Sequence[HubFile]) -> list[HubFile]:
    """The safetensors files of the folder. Some repositories hold the weights a second time, for another program, as
    consolidated.safetensors."""
    found = [file for file in root if file.name.endswith(".safetensors")]
    return [file for file in found if file.name.startswith("model")] or found


def _one_gguf(name: HubName, ggufs: Sequence[HubFile]) -> HubFile:
    if not ggufs:
        raise UsageError(
            f"{name.repository} holds no GGUF file, so that nothing is called {name.choice!r} there",
            hint=f"name it without that: {attrs.evolve(name, choice=None).text}",
        )
    fitting = [file for file in ggufs if name.choice is None or _fits(name.choice, file)]
    if len(fitting) == 1:
        if _PART.search(fitting[0].name):
            raise _split(name, fitting)
        return fitting[0]
    if fitting and all(_PART.search(file.name) for file in fitting) and len({_whole(f) for f in fitting}) == 1:
        raise _split(name, fitting)
    listed = sorted(fitting or ggufs, key=lambda file: file.name)
    lines = ", ".join(f"{file.name} ({format_bytes(file.size)})" for file in listed[:_SHOWN])
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    if name.choice is None:
        what = f"{name.repository} holds {len(listed)} GGUF files and none is chosen"
    elif fitting:
        what = f"{name.choice!r} fits {len(listed)} GGUF files of {name.repository}"
    else:
        what = f"{name.repository} holds no GGUF file {name.choice!r}"
    example = next((kind for file in listed if (kind := file_quantisation([file.name]))), _last(listed[0]))
    hint = f"choose one by its name or its quantisation, such as {attrs.evolve(name, choice=example).text}"
    raise UsageError(f"{what}: {lines}{more}", hint=hint)


def _fits(choice: str, file: HubFile) -> bool:
    if choice.lower().endswith(".gguf"):
        return choice in (file.name, _last(file))
    return file_quantisation([file.name]) == choice


def _split(name: HubName, parts: Sequence[HubFile]) -> CheckpointError:
    return CheckpointError(
        f"{name.text}: {_whole(parts[0])} is split into parts, which are not read; nothing is fetched",
        hint="choose a GGUF of one file; or fetch the parts yourself and join them: "
        "llama-gguf-split --merge FIRST_PART WHOLE.gguf",
    )


def _no_model(name: HubName, root: Sequence[HubFile], tensors: Sequence[HubFile]) -> CheckpointError:
    if tensors:
        return CheckpointError(
            f"{name.text} holds {tensors[0].name} and no config.json: parts of a model, or an adapter to one",
            hint="name the repository of the whole model",
        )
    pickles = [file.name for file in root if file.name.lower().endswith(_PICKLES)]
    if pickles:
        return CheckpointError(
            f"{name.text} holds its weights as {', '.join(pickles[:3])} alone: unpickling them can run any code",
            hint="look for a repository of the same model with safetensors or GGUF files; or convert it and name the "
            "converted folder",
        )
    return CheckpointError(
        f"{name.text} holds no safetensors and no GGUF file", hint="name a repository with weights of a model"
    )


def _last(file: HubFile) -> str:
    return PurePosixPath(file.name).name


def _whole(file: HubFile) -> str:
    return _PART.sub(".gguf", file.name)
