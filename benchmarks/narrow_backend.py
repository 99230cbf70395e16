"""The JAX backend with a smaller closed set of programs, for benchmarks whose clients are known: what is left out is
not compiled, and what is left in is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxcel_jax_cuda.launch import Launching, Shape, Widths


def narrow(backend_class: Any, rows: tuple[int, ...] | None = None, tokens: tuple[int, ...] | None = None) -> Any:
    """With decodes of these widths alone, and pieces of these; None leaves those that the engine has. At level R1 it
    has one of each anyway. Nothing is scored."""

    class NarrowBackend(backend_class):  # type: ignore[misc]
        def start(self, layout: Any, sampler: Any) -> None:
            super().start(layout, sampler)
            if self.caps.level == "R1":
                widths = Widths((self.caps.r1_rows,), (self.caps.r1_tokens,))
                self._running.launching = FewLaunches(widths, slots=layout.slots, pages=self._running.launching.pages)
            else:
                self._running.launching = FewLaunches.of(self._running.launching, rows, tokens)

        def _listed(self, *given: Any) -> Iterator[Any]:
            """Each once: scores of all kinds are one program here."""
            yield from {program.name: program for program in super()._listed(*given)}.values()

    return NarrowBackend


class FewLaunches(Launching):
    """Nothing is scored, so that what would score is the narrowest decode, and its programs are there once."""

    @classmethod
    def of(cls, whole: Launching, rows: tuple[int, ...] | None, tokens: tuple[int, ...] | None) -> FewLaunches:
        widths = Widths(rows or whole._widths.rows, tokens or whole._widths.tokens)
        return cls(widths, slots=whole._slots, pages=whole.pages)

    @property
    def shapes(self) -> list[Shape]:
        return super().shapes[1:]

    @property
    def scores(self) -> Shape:
        return super().shapes[0]
