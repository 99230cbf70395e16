"""Parts of a depth by blocks of their own: what lowers, what is refused, and when it is chosen. Bits are compared on a
GPU."""

import attrs
import jax
import jax.numpy as jnp
import pytest
from test_jax_row_products import HEADS, LAYERS, NORMED, extra_of, lowered, shape

from mlxcel_jax_cuda.kernels.row_products_apart import apart, ended, parts_of, worth_it
from mlxcel_jax_cuda.kernels.row_products_ends import Residual
from mlxcel_jax_cuda.kernels.row_products_tiled import tiled
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, Weight

ENDED = [
    (Residual(2), Weight(512, 512, 4), 256),
    (Residual(1), Weight(512, 256, 2), 64),
    (attrs.evolve(HEADS, runs=True), Weight(512, 256, 2, 32), 128),
    (attrs.evolve(NORMED, runs=True), Weight(512, 512, 4, 64), 64),
]


@pytest.mark.parametrize(("end", "weight", "tokens"), ENDED, ids=repr)
def test_parts_and_their_end_lower_for_cuda_as_two_kernels(end, weight, tokens):
    """And give what `tiled` gives of the same."""
    at, columns = Stacked(384, weight.packed_shape[0] + 512), 128 if tokens % 128 == 0 else 64
    normed = not isinstance(end, Residual)
    squares, eps = (shape(weight.depth // 64, tokens, dtype=jnp.float32), 1e-5) if normed else (None, None)
    given = (
        *(shape(LAYERS * at.stride, 64), shape(tokens, weight.depth), shape(1, dtype=jnp.int32)),
        *(squares, extra_of(end, tokens)),
    )

    def by(product):
        return lambda *given: product(*given, weight=weight, columns=columns, end=end, eps=eps, at=at)

    assert lowered(by(apart), *given).count("custom_call @mosaic_gpu") == 2
    assert jax.eval_shape(by(apart), *given) == jax.eval_shape(by(tiled), *given)


@pytest.mark.parametrize(
    ("tokens", "weight", "sms", "chosen"),
    [
        (64, Weight(2048, 8192, 4), 132, True),
        (128, Weight(2048, 8192, 4), 132, True),
        (512, Weight(2048, 8192, 4), 132, False),
        (128, Weight(3072, 2048, 2, 32), 132, True),
        (128, Weight(9216, 2048, 2), 132, False),  # 72 blocks by `tiled`
        (64, Weight(16384, 2048), 132, False),  # no parts
        (128, Weight(2048, 8192, 4), 20, False),
    ],
)
def test_it_is_chosen_where_half_of_the_device_had_nothing_to_do(tokens, weight, sms, chosen):
    assert worth_it(tokens, weight, sms) is chosen


def test_what_does_not_fit_is_refused():
    weight = Weight(512, 512, 4)
    tiles, parts = jnp.zeros(weight.packed_shape, jnp.bfloat16), jnp.zeros((4, 8, 64, 64), jnp.float32)
    x = jnp.zeros((64, 512), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiple of columns=128"):
        parts_of(tiles, x, weight=weight, columns=128)
    with pytest.raises(ValueError, match="multiple of columns=256"):
        parts_of(tiles, x, weight=weight, columns=256)
    extra = jnp.zeros((512, 64), jnp.float32), jnp.zeros((3, 512), jnp.float32)
    with pytest.raises(ValueError, match="not those of"):
        ended(parts[:2], extra=extra, weight=weight, end=Residual(1))
    with pytest.raises(ValueError, match="not those of"):
        ended(parts[..., :40], extra=extra, weight=weight, end=Residual(1))
    with pytest.raises(ValueError, match="must be there together"):
        ended(parts, extra=extra, weight=weight, end=Residual(1), eps=1e-5)
