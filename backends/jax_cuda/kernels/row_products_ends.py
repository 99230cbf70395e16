"""How a product ends: what becomes of the float32 sums of a row tile, while they are in registers. At the end of
`stream` and of `tiled`.

Each end is a frozen record. It says which arrays it takes besides the product's own (`extra`, in order; the last
`in_place` of them are written where they lie), what it gives, and what it does with the sums of an item: one [64, N]
array, or of a paired weight two. Arrays that hold several layers are read at `layer`, a number in registers. No end
changes a row's order of summation.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import (
    ROOM,
    TILED,
    TRANSPOSED,
    WGMMA,
    across,
    added_rows,
    along,
    load,
    plgpu,
    shaped,
    store,
    store_tokens,
)
from mlxcel_jax_cuda.kernels.rounding import add_scaled, rounded, turned
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.kernels.sizes import TILE

Refs = tuple[Any, ...]
Sums = list[jax.Array]


class End(Protocol):
    """What `stream` asks of the end of a launch."""

    @property
    def in_place(self) -> int:
        """How many of the last extra arrays are written where they lie."""
        ...

    def out(self, weight: Weight, columns: int) -> list[Any]:
        """Shapes of what is given, without the arrays written in place."""
        ...

    def scratch(self, columns: int, warpgroups: int = 0) -> list[Any]:
        """Shared memory of its own; of several warpgroups each the same, [warpgroups, buffers, …], whose runs of tokens
        take the buffers in turn."""
        ...

    @property
    def ahead(self) -> int:
        """How many runs of tokens, of those that `tiled` ends one behind the other, registers hold `before` of."""
        ...

    @property
    def token_axes(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        """Of each extra array, and of each that is given: the axis of tokens. None where it has none."""
        ...

    def before(self, item: Any, layer: Any, extra: Refs) -> Any:
        """Loads that do not need the sums."""
        ...

    def finish(self, sums: Sums, item: Any, layer: Any, ready: Any, extra: Refs, out: Refs, scratch: Refs) -> None:
        """`ready` is what `before` loaded."""
        ...


@attrs.frozen
class _Plain:
    """An end that loads nothing early, needs no room and writes nothing in place."""

    @property
    def in_place(self) -> int:
        return 0

    @property
    def ahead(self) -> int:
        return 1

    def scratch(self, columns: int, warpgroups: int = 0) -> list[Any]:
        return []

    def before(self, item: Any, layer: Any, extra: Refs) -> Any:
        return None


@attrs.frozen
class Store(_Plain):
    """y [N, F], the rows of a paired weight in the order of its tiles."""

    dtype: Any = jnp.bfloat16

    def out(self, weight: Weight, columns: int) -> list[Any]:
        return [shaped((columns, weight.rows), self.dtype)]

    @property
    def token_axes(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        return (), (0,)

    def finish(self, sums: Sums, item: Any, layer: Any, ready: Any, extra: Refs, out: Refs, scratch: Refs) -> None:
        for i, total in enumerate(sums):
            store_tokens(out[0].at[:, pl.ds((item * len(sums) + i) * TILE, TILE)], total)


@attrs.frozen
class Gate(_Plain):
    """h [N, F/2] bf16 = silu(gate) * up, of a weight whose gate rows face its up rows."""

    def out(self, weight: Weight, columns: int) -> list[Any]:
        return [shaped((columns, weight.rows // 2), jnp.bfloat16)]

    @property
    def token_axes(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        return (), (0,)

    def finish(self, sums: Sums, item: Any, layer: Any, ready: Any, extra: Refs, out: Refs, scratch: Refs) -> None:
        gate, up = sums
        store_tokens(out[0].at[:, pl.ds(item * TILE, TILE)], gate / (1 + jnp.exp(-gate)) * up)


@attrs.frozen
class Residual(_Plain):
    """x' = x + y, and what the next product's norm needs: see `Carried`.

    extra: x [F, N] float32, gains [G, F] float32, of which the next norm's is at 2 * layer + `norm`.
    """

    norm: int = 0

    def out(self, weight: Weight, columns: int) -> list[Any]:
        F, N = weight.rows, columns
        shapes = (((F, N), jnp.float32), ((N, F), jnp.bfloat16), ((F // TILE, N), jnp.float32))
        return [shaped(*shape) for shape in shapes]

    @property
    def token_axes(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        return (1, None), (1, 0, 1)

    def scratch(self, columns: int, warpgroups: int = 0) -> list[Any]:
        if not warpgroups:
            return []
        staged = plgpu.SMEM((warpgroups, 2, columns, TILE), jnp.bfloat16, transforms=TILED)
        return [plgpu.SMEM((warpgroups, 1, ROOM), jnp.float32), staged]

    def before(self, item: Any, layer: Any, extra: Refs) -> Any:
        rows = pl.ds(item * TILE, TILE)
        return load(extra[0].at[rows]), load(extra[1].at[2 * layer + self.norm, rows], WGMMA.reduce(1))

    def finish(self, sums: Sums, item: Any, layer: Any, ready: Any, extra: Refs, out: Refs, scratch: Refs) -> None:
        (total,), (old, gain), rows = sums, ready, pl.ds(item * TILE, TILE)
        new = old + total
        store(out[0].at[rows], new)
        scaled = new * along(gain, new.shape[1])
        if scratch:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            staged = scratch[1]
            staged.T[...] = plgpu.layout_cast(scaled.astype(jnp.bfloat16), TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, out[1].at[:, rows])
        else:
            store_tokens(out[1].at[:, rows], scaled)
        store(out[2].at[item], added_rows(new * new, *scratch[:1]))


@attrs.frozen
class Heads:
    """q, k and v of one token a row, as attention wants them: bias, norm by head, rotary embedding; k and v on their
    pages. The weight's rows face each other by halves of a head.

    extra, N columns and L `layers`: bias [L, F] float32 in the order of the tiles (with `bias`); gains [L, 2, 2, 64]
    float32 of q and of k, halves of a head apart (with `normed`); cos and sin [64, N] float32, one row a pair of dims,
    repeated for each head of a tile; page and place [N] int32, page -1 for a row that is padding; keys and values in
    place, bf16 [L * pages, K, page_size, 2, d/2].
    Gives q [N, K, C, 2, d/2] bf16, the H/K heads of a KV head in the first of its C columns; others stay as they were.
    """

    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    bias: bool = False
    normed: bool = False
    eps: float = 1e-6
    layers: int = 1
    runs: bool = False  # tokens mostly follow one another: those of a page go there at once, and nothing waits for them

    @property
    def in_place(self) -> int:
        return 2

    @property
    def ahead(self) -> int:
        return int(self.runs)

    def __attrs_post_init__(self) -> None:
        group = self.heads // self.kv_heads
        if self.heads % self.kv_heads or self.kv_heads % self.together or (group > 1 and group % self.together):
            raise ValueError(
                f"{self.heads} heads of {self.kv_heads} KV heads do not fill tiles of {self.together}, a group a tile"
            )

    @property
    def together(self) -> int:
        """Heads of an item."""
        return 2 * TILE // self.head_dim

    @property
    def query_columns(self) -> int:
        """C: attention's products have a multiple of 8 columns a KV head."""
        return -(-self.heads // self.kv_heads // 8) * 8

    def out(self, weight: Weight, columns: int) -> list[Any]:
        return [shaped((columns, self.kv_heads, self.query_columns, 2, self.head_dim // 2), jnp.bfloat16)]

    @property
    def token_axes(self) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
        small = (None,) * (self.bias + self.normed)
        return (*small, 1, 1, 0, 0, None, None), (0,)

    def scratch(self, columns: int, warpgroups: int = 0) -> list[Any]:
        staged = (2, columns, self.together, self.head_dim // 2)
        if not warpgroups:
            return [plgpu.SMEM(staged, jnp.bfloat16)]
        room = [plgpu.SMEM((warpgroups, 1, ROOM), jnp.float32)] if self.normed else []
        return [plgpu.SMEM((warpgroups, 1, *staged), jnp.bfloat16), *room]

    def before(self, item: Any, layer: Any, extra: Refs) -> Any:
        """(biases of both halves or None, gains or None, cos, sin)."""
        rest, biases, gains = list(extra), None, None
        if self.bias:
            bias = rest.pop(0)
            biases = [load(bias.at[layer, pl.ds((2 * item + i) * TILE, TILE)], WGMMA.reduce(1)) for i in (0, 1)]
        if self.normed:
            of_k, gain = (item >= self.heads // self.together).astype(jnp.int32), rest.pop(0)
            gains = [load(gain.at[layer, of_k, i], WGMMA.reduce(1)) for i in (0, 1)]
        return biases, gains, load(rest[0]), load(rest[1])

    def finish(self, sums: Sums, item: Any, layer: Any, ready: Any, extra: Refs, out: Refs, scratch: Refs) -> None:
        (first, second), (biases, gains, cos, sin) = sums, ready
        columns, together = first.shape[1], self.together
        if biases is not None:
            first, second = (rounded(x) + along(bias, columns) for x, bias in zip(sums, biases, strict=True))
        turns = item * together < self.heads + self.kv_heads  # else it is v
        a, b = first, second
        if gains is not None:  # one head an item, so a column's sum of squares is that head's
            scale = across(
                lax.rsqrt(added_rows(add_scaled(a, a, b, b), *scratch[1:]) / self.head_dim + self.eps), columns
            )
            a, b = a * scale * along(gains[0], columns), b * scale * along(gains[1], columns)
        first, second = (jnp.where(turns, x, y) for x, y in zip(turned(a, b, cos, sin), (first, second), strict=True))
        staged = scratch[0]
        if self.runs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, value in enumerate((first, second)):
            values = plgpu.layout_cast(value.astype(jnp.bfloat16), TRANSPOSED)
            store(staged.at[half].reshape(columns, TILE).T, values)
        plgpu.commit_smem()
        page_g, place_g, keys_g, values_g = extra[-4:]
        head, first_page = item * together, layer * (keys_g.shape[0] // self.layers)

        @pl.when(head < self.heads)
        def _queries() -> None:
            group = self.heads // self.kv_heads
            kv_head, column = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
            if group == 1:
                where = out[0].at[:, pl.ds(kv_head, together), 0]
            else:
                where = out[0].at[:, kv_head, pl.ds(column, together)]
            for half in (0, 1):
                plgpu.copy_smem_to_gmem(staged.at[half], where.at[:, :, half])

        for pages_g, start in ((keys_g, self.heads), (values_g, self.heads + self.kv_heads)):

            @pl.when((head >= start) & (head < start + self.kv_heads))
            def _on_pages(pages_g: Any = pages_g, start: int = start) -> None:
                kept_heads = pl.ds(head - start, together)

                def write(first: Any) -> None:  # where they go is read at once
                    where = [(page_g[first + i], place_g[first + i]) for i in range(8)]
                    for i, (page, place) in enumerate(where):

                        @pl.when(page >= 0)
                        def _write(column: Any = first + i, page: Any = page, place: Any = place) -> None:
                            row = pages_g.at[first_page + page, kept_heads, place]
                            for half in (0, 1):
                                plgpu.copy_smem_to_gmem(staged.at[half, column], row.at[:, half])

                if not self.runs:
                    for column in range(0, columns, 8):
                        write(column)
                    return
                page, place, last = page_g[0], place_g[0], columns - 1
                run = (page >= 0) & (page_g[last] == page) & (place_g[last] == place + last)

                @pl.when(run)
                def _together() -> None:
                    rows = pages_g.at[first_page + page, kept_heads, pl.ds(place, columns)]
                    for half in (0, 1):
                        plgpu.copy_smem_to_gmem(staged.at[half].transpose((1, 0, 2)), rows.at[:, :, half])

                @pl.when(jnp.logical_not(run))
                def _one_by_one() -> None:
                    def eight(i: Any, carry: Any) -> Any:
                        write(i * 8)
                        return carry

                    lax.fori_loop(0, columns // 8, eight, 0)

        if not self.runs:
            plgpu.wait_smem_to_gmem(0)
