"""Ropes from GGUF metadata, and from the small tensors that it keeps divisors of pairs in."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import LARGEST, ConfigKeys
from mlxcel.plugins.families.rope import BASES, DEFAULT_BASE, Rope
from mlxcel.plugins.families.rope_hf import SLIDING
from mlxcel.plugins.families.rope_scaling import MOST_DIVISOR, Linear, LongRope, PairDivisors
from mlxcel.plugins.families.rope_yarn import Yarn, check_yarn, yarn_magnitude

FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""Divisors of pairs: of llama3 scaling, and of longrope's two regimes."""


def rope_from_gguf(keys: ConfigKeys, head_dim: int, checkpoint: Checkpoint) -> Rope:
    """The rope of the layers that see everything, of all layers in most models.

    `rope.dimension_count` may be less than `head_dim`. CheckpointError names the key that is wrong or not known.
    """
    dim = keys.size("rope.dimension_count", head_dim)
    if dim > head_dim or (dim % 2 and keys.has("rope.dimension_count")):
        raise keys.wrong("rope.dimension_count", f"an even number up to the head dimension {head_dim}")
    plain = Rope(dim, _base(keys, "rope.freq_base", DEFAULT_BASE))
    # Without a type a factor is linear: files from before there were types have one.
    kind = keys.word("rope.scaling.type", ("none", "linear", "yarn", "longrope"), default="linear")
    tensors = [name for name in (FREQS, SHORT, LONG) if name in checkpoint.tensors]
    factor = _factor(keys)
    if tensors and (kind == "yarn" or (kind == "linear" and factor != 1)):
        raise CheckpointError(f"the GGUF file has {tensors[0]} beside {kind} scaling", hint="one of them is wrong")
    if tensors == [FREQS]:
        rope = attrs.evolve(plain, scaling=PairDivisors(_divisors(checkpoint, FREQS, dim)))
    elif tensors == [SHORT, LONG]:
        short, long = (_divisors(checkpoint, name, dim) for name in tensors)
        rope = attrs.evolve(plain, scaling=LongRope(short, long, _original(keys)))
    elif tensors or kind == "longrope":
        raise CheckpointError(
            f"the GGUF file has {' and '.join(tensors) or 'no divisors'}: longrope needs {SHORT} and {LONG} alone"
        )
    elif kind == "yarn":
        rope = _yarn(plain, keys, factor)
    else:
        rope = plain if factor == 1 or kind == "none" else attrs.evolve(plain, scaling=Linear(factor, _original(keys)))
    return attrs.evolve(rope, magnitude=rope.magnitude * keys.real("rope.scaling.attn_factor", 1.0))


def ropes_from_gguf(
    keys: ConfigKeys, head_dim: int, checkpoint: Checkpoint, kinds: Sequence[str], *, local_base: float | None = None
) -> dict[str, Rope]:
    """A rope for each of `kinds` of attention layers, as `ropes_from_hf` has them.

    With `local_base`, the family's own, sliding layers are unscaled and of the base `rope.freq_base_swa`, else of that
    one. Without it they are like the others but for `rope.freq_base_swa`, if the file has it. Raises as
    `rope_from_gguf`.
    """
    full = rope_from_gguf(keys, head_dim, checkpoint)
    if keys.size("rope.dimension_count_swa", full.dim) != full.dim:
        raise keys.wrong("rope.dimension_count_swa", f"{full.dim} as of the other layers")
    base = _base(keys, "rope.freq_base_swa", full.base if local_base is None else local_base)
    sliding = attrs.evolve(full, base=base) if local_base is None else Rope(full.dim, base)
    return {kind: sliding if kind == SLIDING else full for kind in kinds}


def _yarn(plain: Rope, keys: ConfigKeys, factor: float) -> Rope:
    """`yarn_log_multiplier` is mscale_all_dim beside an mscale of 1, `yarn_attn_factor` a config's attention_factor."""
    scaling = Yarn(
        factor,
        _original(keys),
        keys.real("rope.scaling.yarn_beta_fast", 32.0),
        keys.real("rope.scaling.yarn_beta_slow", 1.0),
    )
    check_yarn(
        scaling, plain.base, plain.dim, keys, "rope.scaling.yarn_beta_fast", "rope.scaling.original_context_length"
    )
    if keys.real("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise keys.wrong("rope.scaling.yarn_ext_factor", "1: waves are kept whole or not at all")
    share = keys.real_or_zero("rope.scaling.yarn_log_multiplier")
    magnitude = keys.real("rope.scaling.yarn_attn_factor", yarn_magnitude(factor, 1.0, share))
    return attrs.evolve(plain, scaling=scaling, magnitude=magnitude)


def _base(keys: ConfigKeys, key: str, default: float) -> float:
    return keys.real(key, default, least=BASES[0], largest=BASES[1])


def _factor(keys: ConfigKeys) -> float:
    """`rope.scaling.factor` or its older spelling; 0 means none."""
    key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    if not keys.real_or_zero(key):
        return 1.0
    return keys.real(key, least=1, largest=LARGEST / _original(keys))


def _original(keys: ConfigKeys) -> int:
    context = keys.size("context_length")
    original = keys.size("rope.scaling.original_context_length", context)
    if original > context:
        raise keys.wrong("rope.scaling.original_context_length", f"at most context_length {context}")
    return original


def _divisors(checkpoint: Checkpoint, name: str, dim: int) -> tuple[float, ...]:
    info = checkpoint.tensors[name]
    if info.shape != (dim // 2,):
        raise CheckpointError(f"{name} is {list(info.shape)}, the rotary dimension {dim} needs [{dim // 2}]")
    read = ConfigKeys({name: checkpoint.read(name).tolist()}, "the GGUF file")
    return read.reals(name, dim // 2, largest=MOST_DIVISOR)
