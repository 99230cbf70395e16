"""Arrays that hold the same of several layers, one behind the other: which of them a kernel is to read."""

from __future__ import annotations

from typing import Any

import numpy as np


def layer_operand(layer: int | None) -> Any:
    """int32 [1], a constant of the program that the kernel reads on the device: so all layers run one kernel, which is
    lowered and compiled once. None for an array of one layer."""
    return None if layer is None else np.array([layer], np.int32)


def check_layers(count: int, layer: int | None, layers: int) -> None:
    """ValueError where `count` pages are not those of so many layers, or it is not said whose are meant."""
    if count % layers or (layer is None and layers > 1) or not 0 <= (layer or 0) < layers:
        raise ValueError(f"layer {layer} of {count} pages of {layers} layers: each has as many, and one must be named")
