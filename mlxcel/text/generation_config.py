"""What is taken from generation_config.json beside the weights, by `--generation-config auto|eos|none|FILE`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from mlxcel.errors import CheckpointError, UsageError, shown
from mlxcel.plugins.formats.json_file import read_json_object

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint

FILE_NAME: Final = "generation_config.json"


@attrs.frozen
class GenerationDefaults:
    """The model's own defaults, each taken alone; None and () mean that the file does not say. Penalties never are.

    `eos_origin` is the file that names the ends. `temperature` is 0.0 where the file says `"do_sample": false`.
    """

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    eos_origin: str | None = None

    @property
    def sampling(self) -> Mapping[str, Any]:
        """By the fields of SamplingParams, None where the file does not say."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    @classmethod
    def read(cls, mode: str | Path, checkpoint: Checkpoint) -> GenerationDefaults:
        """`mode` is "auto", "eos" (end ids only), "none", or a file that is read as "auto" reads the checkpoint's; one
        that names no end leaves those of the checkpoint's in force.

        Raises CheckpointError for a value of a wrong type or out of range in the checkpoint's file, UsageError for one
        in the operator's and when that cannot be read; both name the file and the key. What a mode does not take is
        not looked at.
        """
        if mode == "none":
            return cls()
        if mode in ("auto", "eos"):
            return cls._beside_weights(checkpoint, eos_only=mode == "eos")
        try:
            taken = _taken(read_json_object(Path(mode)), str(mode), eos_only=False)
        except CheckpointError as error:
            raise UsageError(
                f"--generation-config: {error.message}",
                hint="auto, eos, none, or the name of a JSON file like generation_config.json",
            ) from error
        if taken.eos_origin is not None:
            return taken
        ends = cls._beside_weights(checkpoint, eos_only=True)
        return attrs.evolve(taken, eos_ids=ends.eos_ids, eos_origin=ends.eos_origin)

    @classmethod
    def _beside_weights(cls, checkpoint: Checkpoint, *, eos_only: bool) -> GenerationDefaults:
        settings = checkpoint.assets.get(FILE_NAME)
        return cls() if settings is None else _taken(settings, str(checkpoint.path / FILE_NAME), eos_only=eos_only)


def _taken(settings: Mapping[str, Any], file: str, *, eos_only: bool) -> GenerationDefaults:
    named = settings.get("eos_token_id")
    eos, eos_origin = id_list(named, f"{file}: eos_token_id"), None if named is None else file
    if eos_only:
        return GenerationDefaults(eos_ids=eos, eos_origin=eos_origin)
    temperature = _number(settings, "temperature", file, 100.0)
    do_sample = settings.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise _wrong(f"{file}: do_sample", do_sample, "true or false")
    top_k = settings.get("top_k")
    if top_k is not None and (type(top_k) is not int or not -1 <= top_k < 2**63):
        raise _wrong(f"{file}: top_k", top_k, "an integer of at least -1")
    return GenerationDefaults(
        eos_ids=eos,
        temperature=0.0 if do_sample is False else temperature,
        top_p=_number(settings, "top_p", file, 1.0),
        top_k=top_k,
        eos_origin=eos_origin,
    )


def id_list(value: Any, what: str) -> tuple[int, ...]:
    """The ids of an `eos_token_id`: an integer, a list of integers, or null. `what` names the place in errors.

    Raises CheckpointError for anything else. Ranges are not looked at: -1, for one, means "none" in some files.
    """
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in values:
        if type(item) is not int:
            raise CheckpointError(
                f"{what} is {shown(item)}, a token id or a list of them is needed", hint="correct the file"
            )
    return tuple(values)


def _number(settings: Mapping[str, Any], key: str, file: str, most: float) -> float | None:
    value = settings.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= most:
        raise _wrong(f"{file}: {key}", value, f"a number from 0 to {most:g}")
    return float(value)


def _wrong(what: str, value: Any, needed: str) -> CheckpointError:
    return CheckpointError(
        f"{what} is {shown(value)}, {needed} is needed",
        hint="correct the file, or start with --generation-config eos, which takes the end ids only",
    )
