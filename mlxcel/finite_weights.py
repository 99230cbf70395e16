"""A checkpoint that names the tensors which hold NaN or infinities, as they are read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint, TensorInfo

log = logging.getLogger("mlxcel.load")


@attrs.frozen(eq=False)
class FiniteWeights:
    """As the checkpoint inside, with a warning for each tensor that is not finite: the model may run all the same, if
    nobody meets these values."""

    inside: Checkpoint

    @property
    def path(self) -> Path:
        return self.inside.path

    @property
    def format(self) -> str:
        return self.inside.format

    @property
    def naming(self) -> str:
        return self.inside.naming

    @property
    def architecture(self) -> str:
        return self.inside.architecture

    @property
    def config(self) -> Mapping[str, Any]:
        return self.inside.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.inside.tensors

    @property
    def assets(self) -> Mapping[str, Any]:
        return self.inside.assets

    @property
    def quantisation(self) -> str:
        return self.inside.quantisation

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        values = self.inside.read(name, out)
        spoilt = values.size - int(np.count_nonzero(np.isfinite(values)))
        if spoilt:
            log.warning("the tensor %s has %d values of %d that are not finite", name, spoilt, values.size)
        return values

    def close(self) -> None:
        self.inside.close()
