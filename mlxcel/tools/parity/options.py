"""What `mlxcel engine-parity` is asked for (docs/spec/clients.md 5.1)."""

from __future__ import annotations

from typing import Final

import attrs

from mlxcel.errors import UsageError

GROUPS: Final = ("client", "storage", "cache", "chunk", "batch", "backend")
"""Groups of pairs, in the order of the rows."""

CASES: Final = ("greedy", "seeded", "ahead")
"""`ahead` is `seeded` without DRY, which has to see a token before the next step can be made: with it no step runs
ahead. The direct client reads each step there before the next one begins, so that others are compared with that."""

PROMPT_TOKENS: Final = 640
MAX_TOKENS: Final = 64
CHUNKS: Final = (128, 512)
BATCH: Final = 4
SEED: Final = 1234


@attrs.frozen(kw_only=True)
class ParityOptions:
    """`groups` None: all, `backend` where there is a second one. `other_backend` None: the reference, or the next that
    is available; `gap_bound` None: what the types of the computation and the weights allow, in nats."""

    max_tokens: int = MAX_TOKENS
    cases: tuple[str, ...] = CASES
    groups: tuple[str, ...] | None = None
    chunks: tuple[int, int] = CHUNKS
    batch: int = BATCH
    other_backend: str | None = None
    gap_bound: float | None = None
    seed: int = SEED
    require: tuple[str, ...] = ()
    expect_identical: bool = False

    def __attrs_post_init__(self) -> None:
        first, second = self.chunks
        if first == second:
            raise UsageError(f"--chunks {first},{second}: both are the same", hint="name two sizes, such as 128,512")
        if self.other_backend is not None and self.groups is not None and "backend" not in self.groups:
            raise UsageError(
                f"--other-backend {self.other_backend}: --pairs leaves backend out", hint="add backend to --pairs"
            )
        missing = [group for group in self.require if self.groups is not None and group not in self.groups]
        if missing:
            raise UsageError(
                f"--require {missing[0]}: --pairs leaves it out", hint=f"add {missing[0]} to --pairs, or require less"
            )
