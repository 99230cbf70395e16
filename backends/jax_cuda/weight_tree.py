"""Parameters as a flax.nnx module tree. Flax is a fifth of what a start imports: only what needs a tree has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx


class Tree(nnx.Module):
    """The parameters by name. Each knows the letters of its axes, by which a mesh would share them out."""

    def __init__(self, layers: int) -> None:
        self.model: Any = nnx.Dict()
        self.layers: Any = nnx.List([nnx.Dict() for _ in range(layers)])

    def put(self, name: str, layer: int | None, values: jax.Array, axes: str) -> None:
        (self.model if layer is None else self.layers[layer])[name] = nnx.Param(values, axes=tuple(axes))

    def leaves(self) -> Iterator[tuple[str, int, jax.Array]]:
        """Name, layer and values in the tree's own order; layer 0 for what is outside layers."""
        _, state = nnx.split(self)
        for path, variable in nnx.to_flat_state(state):
            layer, name = (0, path[-1]) if path[0] == "model" else (int(str(path[1])), path[-1])
            yield str(name), layer, variable[...]
