"""Ropes from config.json, in each of the spellings that checkpoints have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import LARGEST, ConfigKeys
from mlxcel.plugins.families.rope import BASES, DEFAULT_BASE, Rope
from mlxcel.plugins.families.rope_scaling import MOST_DIVISOR, Dynamic, Linear, Llama3Scaling, LongRope, Scaling
from mlxcel.plugins.families.rope_yarn import Yarn, check_yarn, yarn_magnitude

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention layers, as `layer_types` and a nested `rope_parameters` name them."""

KNOWN = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3")
"""Types of a scaling. `su` is longrope's first name."""

EXPECTED = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    *("finetuned", "mrope_section", "mrope_interleaved"),  # no effect on text
)
"""Keys of a scaling of any type. One that is none of these would change the answer in a way nobody here knows."""


def rope_from_hf(keys: ConfigKeys, head_dim: int) -> Rope:
    """The one rope of a model whose layers all have the same, from `rope_theta`, `rope_scaling`, `rope_parameters`.

    CheckpointError names the key that is wrong or not known.
    """
    kinds = sorted({kind for _, inner in _mappings(keys) for kind in _kinds(inner)}) or [FULL]
    ropes = ropes_from_hf(keys, head_dim, kinds)
    if len(set(ropes.values())) > 1:
        raise CheckpointError(
            f"config.json: rope_parameters differ between {' and '.join(kinds)}, and the model turns all layers alike"
        )
    return ropes[kinds[0]]


def ropes_from_hf(
    keys: ConfigKeys, head_dim: int, kinds: Sequence[str], *, local_base: float | None = None
) -> dict[str, Rope]:
    """A rope for each of `kinds` of attention layers (FULL, SLIDING).

    `rope_parameters` may hold a mapping for each kind. Where it does not, all kinds are turned alike, except that
    sliding layers are unscaled and of the base `rope_local_base_freq`, if the config has it, or else of `local_base`,
    if the family gives one. Raises as `rope_from_hf`.
    """
    if keys.has("rope_local_base_freq"):
        local_base = _base(keys, "rope_local_base_freq")
    ropes = {}
    for kind in kinds:
        local = local_base if kind == SLIDING else None
        base = _base(keys, "rope_theta", DEFAULT_BASE) if local is None else local
        found = {}
        for name, inner in _mappings(keys):
            if not _kinds(inner):
                if local is None:
                    found[name] = inner
            elif (own := inner.within(kind)) is not None:
                base = _base(inner, "rope_theta", base)
                found[name] = own
            elif local is None:
                raise inner.wrong(kind, f"a mapping like that of {' and '.join(_kinds(inner))}: it has such layers")
        ropes[kind] = _rope(found, keys, head_dim, base)
    return ropes


def _mappings(keys: ConfigKeys) -> list[tuple[str, ConfigKeys]]:
    names = ("rope_parameters", "rope_scaling")
    return [(name, inner) for name in names if (inner := keys.within(name)) is not None]


def _kinds(keys: ConfigKeys) -> list[str]:
    """The kinds of layers that a mapping holds a mapping for, none where it is one for all."""
    kinds = [name for name in keys.names() if isinstance(keys.value(name), Mapping)]
    stray = [name for name in keys.names() if name not in (*kinds, "rope_theta")]
    if kinds and stray:
        raise keys.wrong(stray[0], f"inside the mappings of {' and '.join(kinds)}")
    return kinds


def _rope(found: Mapping[str, ConfigKeys], keys: ConfigKeys, head_dim: int, base: float) -> Rope:
    """From the mappings that speak of these layers, by name; they must say the same."""
    base = _agreed({name: _base(inner, "rope_theta", 0) for name, inner in found.items()}, "rope_theta") or base
    parts = {name: inner.real("partial_rotary_factor", 0, largest=1) for name, inner in found.items()}
    part = _agreed(parts, "partial_rotary_factor") or keys.real("partial_rotary_factor", 1.0, largest=1)
    dim = int(head_dim * part)
    if head_dim % 2 and part == 1:
        raise CheckpointError(f"the head dimension {head_dim} must be even for rotary pairs")
    if dim < 2 or dim % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {part:g} of the head dimension {head_dim} turns {dim} dims: "
            f"it must be an even number from 2 to {head_dim}"
        )
    ropes = [_scaled(Rope(dim, base), inner, keys) for inner in found.values()]
    if len(set(ropes)) > 1:
        raise CheckpointError(
            f"config.json: {' and '.join(found)} scale differently "
            f"({', '.join(_type(inner) for inner in found.values())})",
            hint="remove the one that is wrong",
        )
    return ropes[0] if ropes else Rope(dim, base)


def _base(keys: ConfigKeys, key: str, default: float | None = None) -> float:
    return keys.real(key, default, least=BASES[0], largest=BASES[1])


def _agreed(said: Mapping[str, float], key: str) -> float:
    """What the mappings say who say more than 0, or 0."""
    values = sorted({value for value in said.values() if value})
    if len(values) > 1:
        raise CheckpointError(
            f"config.json: {' and '.join(f'{name} says {key} = {value:g}' for name, value in said.items())}",
            hint="remove the one that is wrong",
        )
    return values[0] if values else 0.0


def _type(keys: ConfigKeys) -> str:
    """Both spellings of the key are in use; without a type there is nothing to scale by."""
    name = "rope_type" if keys.has("rope_type") or not keys.has("type") else "type"
    if not keys.has(name) and keys.real("factor", 1.0) != 1:
        raise keys.wrong("factor", "1 or left out where no rope_type says what it does")
    word = keys.word(name, KNOWN, default="default")
    if word == "yarn" and keys.has("long_factor"):
        return "longrope"  # what the first Phi-3 called it
    return "longrope" if word == "su" else word


def _scaled(plain: Rope, keys: ConfigKeys, config: ConfigKeys) -> Rope:
    """`plain` stretched as one mapping says. `config` is the whole config.json."""
    for name in keys.names():
        if name not in EXPECTED:
            raise keys.wrong(name, "left out: what it does to the ropes is not supported")
    match _type(keys):
        case "linear":
            most = config.size("max_position_embeddings")
            original = _original(keys, config, most, most=most)
            return attrs.evolve(plain, scaling=Linear(_factor(keys, original), original))
        case "dynamic":
            original = config.size("max_position_embeddings")
            if (other := _original(keys, config, original, most=original)) != original:
                raise CheckpointError(
                    f"config.json: dynamic ropes are stretched from max_position_embeddings {original}, and not from "
                    f"original_max_position_embeddings {other}",
                    hint="remove the one that is wrong",
                )
            scaling = Dynamic(_factor(keys, original), original)
            if plain.dim == 2 or scaling.stretched_base(plain.base, plain.dim) > BASES[1]:
                raise keys.wrong(
                    "factor", f"less: {plain.dim} turned dims of base {plain.base:g} cannot be stretched so"
                )
            return attrs.evolve(plain, scaling=scaling)
        case "yarn":
            return _yarn(plain, keys, config)
        case "longrope":
            return _longrope(plain, keys, config)
        case "llama3":
            return attrs.evolve(plain, scaling=_llama3(keys, config))
    return plain


def _yarn(plain: Rope, keys: ConfigKeys, config: ConfigKeys) -> Rope:
    most = config.size("max_position_embeddings")
    original = _original(keys, config, most, most=most)
    factor = _factor(keys, original, most / original)
    scaling = Yarn(
        factor, original, keys.real("beta_fast", 32.0), keys.real("beta_slow", 1.0), keys.flag("truncate", True)
    )
    check_yarn(scaling, plain.base, plain.dim, keys, "beta_fast", "original_max_position_embeddings")
    magnitude = yarn_magnitude(factor, keys.real_or_zero("mscale"), keys.real_or_zero("mscale_all_dim"))
    return attrs.evolve(plain, scaling=scaling, magnitude=keys.real("attention_factor", magnitude))


def _longrope(plain: Rope, keys: ConfigKeys, config: ConfigKeys) -> Rope:
    most = config.size("max_position_embeddings")
    original = _original(keys, config, most=most)
    factor = _factor(keys, original, most / original)
    pairs = plain.dim // 2
    scaling = LongRope(
        keys.reals("short_factor", pairs, largest=MOST_DIVISOR),
        keys.reals("long_factor", pairs, largest=MOST_DIVISOR),
        original,
    )
    if original == 1:
        raise keys.wrong("original_max_position_embeddings", "above 1")
    # https://arxiv.org/abs/2402.13753, as the models that use it compute it.
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    return attrs.evolve(plain, scaling=scaling, magnitude=keys.real("attention_factor", magnitude))


def _llama3(keys: ConfigKeys, config: ConfigKeys) -> Scaling:
    low, high = keys.real("low_freq_factor"), keys.real("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    original = _original(keys, config)
    return Llama3Scaling(_factor(keys, original), low, high, original)


def _original(keys: ConfigKeys, config: ConfigKeys, default: int | None = None, *, most: int = LARGEST) -> int:
    """original_max_position_embeddings of the mapping or, where Phi-3 has it, of the config itself; 1 to `most`."""
    name = "original_max_position_embeddings"
    owner = keys if keys.has(name) or not config.has(name) else config
    original = owner.size(name, default, largest=most)
    if config.has(name) and config.size(name) != original:
        raise keys.wrong(name, f"{config.size(name)} as config.json says outside of it")
    return original


def _factor(keys: ConfigKeys, original: int, default: float | None = None) -> float:
    """At least 1, and the stretched context one that a position can be counted in."""
    return keys.real("factor", default, least=1, largest=LARGEST / original)
