"""How the kits say that a law is broken, and the comparison that most of them make."""

from __future__ import annotations

import numpy as np


def broken(law: str, what: str) -> AssertionError:
    """What a check raises: which law, and where it broke."""
    return AssertionError(f"{law}: {what}")


def same_bits(
    law: str,
    what: str,
    got: np.ndarray,
    want: np.ndarray,
    *,
    start: int = 0,
    than: str = "of the prompt fed whole and alone",
) -> None:
    """Logits [T, V] of the positions from `start` on. AssertionError names the first position and logit that differ;
    `want` are those `than` speaks of."""
    if got.shape == want.shape and got.tobytes() == want.tobytes():
        return
    if got.shape != want.shape:
        raise broken(law, f"{what}, the logits are {list(got.shape)}, those {than} {list(want.shape)}")
    position, token = np.argwhere(got.view(np.uint32) != want.view(np.uint32))[0]
    raise broken(
        law,
        f"{what}, the logits at position {start + position} differ from those {than}; "
        f"first at logit {token}: {got[position, token]:.9g} and {want[position, token]:.9g}",
    )
