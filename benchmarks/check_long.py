"""A context of many thousand tokens: the bits of its chunks, and its logits against float32."""

from __future__ import annotations

import attrs
from check_engines import Checks, Rows, not_invariant
from check_reference import error_bound, relative_error
from random_engines import Setup
from witness import alone, difference

LESS = 200
"""Tokens by which the prompt is shorter than the context."""


def context(checks: Checks) -> Rows:
    """One prompt, cut at both chunks and at one that is no width, and the first step behind it against float32 on the
    same device, where every product, norm and score is XLA's."""
    sizes, (small, large) = checks.sizes, checks.sizes.chunks
    shape, layers = sizes.shapes[0]
    setup = Setup(shape, 1, sizes.context, "paged", chunk=large, layers=layers, small=sizes.small)
    length, rows = sizes.context - LESS, sizes.rows[:1]
    bench = checks.engines(setup, rows, sizes.tokens[-2:])
    yield from not_invariant(bench)
    ids = bench.ids(length, length)
    lone = alone(bench, ids, sizes.context_steps, chunk=small)
    for chunk in (large, large // 3):
        found = difference(lone, alone(bench, ids, sizes.context_steps, chunk=chunk))
        yield {"shape": shape, "layers": layers, "prompt": length, "way": f"chunk of {chunk}, {small}",
               "of": len(lone.ids), "differs": found, "wrong": bool(found)}  # fmt: skip
    exact = checks.engines(attrs.evolve(setup, storage="dense"), rows, sizes.tokens[-1:], dtype="float32")
    wanted = alone(exact, ids, 0, chunk=sizes.tokens[-1])
    error, bound = relative_error(lone.logits[0], wanted.logits[0]), error_bound(bench)
    yield {"shape": shape, "layers": layers, "prompt": length, "way": "against float32", "error": error,
           "error_bound": bound, "wrong": error > bound}  # fmt: skip
