"""The text of a product whose weights are in registers: which registers, and which of the tokens, in which order."""

import re

import pytest

from mlxcel_jax_cuda.kernels import persistent_held
from mlxcel_jax_cuda.kernels.persistent_held import DEPTH, WORDS


def at(place):
    """Bytes from the begin of tokens that are tiled for wgmma to the `place`-th 8 values of the first row."""
    tile, chunk = divmod(place, 8)
    return tile * 8 * 128 + chunk * 16


@pytest.mark.parametrize("steps", [8, 32])
def test_weights_meet_their_tokens_in_the_order_of_the_depth(steps):
    """Each register once, and each product into the sums of the one before it, the first into none."""
    text = persistent_held._text(steps)
    products = re.findall(
        r"setp\.ne\.u32 adds, (\d+), 0;\s*add\.u32 place, first, (\d+);\s*mov\.b64 operand, \{place, \d+\};\s*"
        r"wgmma\.\S+ \{([^}]*)\}, \{([^}]*)\}, operand, adds, 1, 1, 0;",
        text,
    )
    assert [bool(int(adds)) for adds, *_ in products] == [False] + [True] * (steps - 1)
    assert [int(place) * 16 for _, place, _, _ in products] == [at(2 * step) for step in range(steps)]
    assert {sums for _, _, sums, _ in products} == {"$0, $1, $2, $3"}
    registers = [int(word) for *_, words in products for word in re.findall(r"\d+", words)]
    assert registers == list(range(WORDS, WORDS + WORDS * steps))
    assert f"bfe.u32 first, ${WORDS + WORDS * steps}, 4, 14;" in text
    assert DEPTH == 16
    assert text.rindex("wait_group") > text.rindex("commit_group") > text.rindex("mma_async")
