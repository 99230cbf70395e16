"""Folders that hold no weights this version can read, refused by name with the reason.

Packed integers and scaled 8-bit floats would look like weights of odd shapes, or of plausible shapes and wrong values,
to everything behind the reader. So a folder is refused as a whole when its config or its tensors speak of packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlxcel.core.checkpoint import TensorInfo
from mlxcel.errors import CheckpointError, shown

PEOPLE_SAY: Final[Mapping[str, str]] = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "torchao": "torchao",
}
"""`quant_method` to the name of the method; others are shown as they are written."""

PACKED_ENDS: Final[Mapping[str, str]] = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".g_idx": "GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "FP8",
    ".weight_scale": "FP8 or compressed-tensors",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
}
"""How the names of tensors end that exist only beside, or instead of, packed weights."""

SETTINGS: Final = ("bits", "group_size", "desc_act", "mode", "fmt", "format", "load_in_4bit", "load_in_8bit", "version")
_NEXT: Final = "take the float checkpoint it was made from (float32, float16 or bfloat16), or a GGUF of the model"


def refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    """By what config.json says. MLX writes `quantization`, all others `quantization_config`."""
    for key in ("quantization_config", "quantization"):
        settings = config.get(key)
        if settings:
            raise CheckpointError(
                f"{path / 'config.json'}: the weights are quantised by {_method(settings)} ({key}{_details(settings)})"
                ", and packed weights of a folder are not read",
                hint=_NEXT,
            )


def refuse_packed(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    """By the tensors of the text model themselves, for a folder whose config.json does not say."""
    ends = tuple(PACKED_ENDS)
    for name, info in tensors.items():
        method = PACKED_ENDS["." + name.rpartition(".")[2]] if name.endswith(ends) else None
        if name.endswith("_blocks") and info.dtype == "U8":
            method = "MXFP4"
        if method is None and name.endswith(".weight"):
            method = _method_of_type(info.dtype, f"{name.removesuffix('weight')}scales" in tensors)
        if method is not None:
            raise CheckpointError(
                f"{path}: the weights are quantised by {method}: there is a tensor {name!r} {list(info.shape)} "
                f"{info.dtype}, and packed weights of a folder are not read",
                hint=_NEXT,
            )


def _method(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return shown(settings)
    method = settings.get("quant_method")
    if method is None:
        return "MLX" if "bits" in settings or "group_size" in settings else "a method it does not name"
    return PEOPLE_SAY.get(method, shown(method)) if isinstance(method, str) else shown(method)


def _details(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return ""
    told = [f"{name} {shown(settings[name])}" for name in SETTINGS if name in settings]
    return f": {', '.join(told)}" if told else ""


def _method_of_type(dtype: str, has_scales: bool) -> str | None:
    """What a weight's type tells; None for plain floats, and for types that its reading refuses by itself."""
    if dtype == "U32":
        return "MLX" if has_scales else "a method that packs into U32"
    if dtype.startswith(("F8_", "F6_", "F4")):
        return f"scaled {dtype} floats"
    if dtype in ("U8", "I8", "I32"):
        return f"a method that packs into {dtype}"
    return None
