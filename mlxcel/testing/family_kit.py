"""Conformance of a model family: `check_family(MyFamily(), checkpoint)` in a test of its own distribution.

Everything runs on reference-numpy and reads each tensor dozens of times: use a checkpoint of a few kilobytes with
random weights in every tensor, biases included, and windows that a prompt of some hundred tokens crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily, WeightSchema
from mlxcel.core.kv import KVSpec, SlidingKV
from mlxcel.testing.family_run import Feed, LoadedFamily, logits_of
from mlxcel.testing.family_schema import check_early_reads, check_schema
from mlxcel.testing.family_watch import WatchedCheckpoint, WatchedFamily
from mlxcel.testing.laws import broken, same_bits

__all__ = ["TOLERANCE", "check_family", "check_schema", "logits_of"]

Reference = Callable[[np.ndarray], np.ndarray]
"""token ids int32 [T] -> logits [T, V], by a forward that shares no code with the family."""

TOLERANCE = 1e-4
"""Of the largest logit: float32 sums of a small model in another order stay well below it, a wrong formula does not."""

LENGTH = 12
"""Tokens of the prompt that `reference` sees, unless a window asks for more."""
CHUNKS = (1, 7, 64)
BEYOND = 6
"""Tokens of a prompt behind the largest window, or behind the largest chunk."""
HEARD = 3
"""Tokens that are sent through one expert alone."""


def check_family(
    family: ModelFamily,
    checkpoint: Checkpoint,
    *,
    reference: Reference | None = None,
    tolerance: float = TOLERANCE,
    twin: Checkpoint | None = None,
) -> None:
    """All laws of a family, on one checkpoint. AssertionError says which law broke, and where.

    - schema, config, KV: what the family declares fits itself and the checkpoint (`check_schema`).
    - pieces, company: logits are the same bits however the prompt is cut and whatever runs beside it, across windows.
    - weights: each tensor of the schema changes the logits, each expert's part of one too, and nothing else is read.
    - reference: logits agree with `reference` within `tolerance` of the largest one.
    - twin: `twin`, the same values in another format, gives the same bits.

    What the KV keeps is checked by `mlxcel.testing.kv_kit.check_kv_spec`.
    """
    watched = WatchedCheckpoint(checkpoint)
    config = family.parse_config(watched)
    schema = check_schema(family, checkpoint, config)
    check_early_reads(watched, schema)
    loaded = LoadedFamily.load(WatchedFamily(family, schema, watched), watched)
    seen = window_crossing(family.kv_spec(config))
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, max(seen, CHUNKS[-1] + BEYOND), np.int32)
    prompt = prompt[: config.context]
    ids = prompt[: max(LENGTH, seen)]
    whole = loaded.logits(ids)
    if whole.shape != (len(ids), config.vocab_size):
        raise broken("rows", f"forward returns {list(whole.shape)}, wanted {[len(ids), config.vocab_size]}")
    if not np.isfinite(whole).all():
        position, token = np.argwhere(~np.isfinite(whole))[0]
        raise broken("numbers", f"logit {token} at position {position} is {whole[position, token]}")
    if reference is not None:
        _check_reference(whole, np.asarray(reference(ids)), tolerance)
    # A family may choose by the engine's bound of positions, so that no bits are compared across two of them.
    for context in dict.fromkeys((len(prompt), config.context)):
        _check_pieces(loaded, prompt, context)
    _check_company(loaded, ids, whole, config.vocab_size)
    _check_every_weight_counts(family, checkpoint, schema, ids[:LENGTH])
    if twin is not None:
        _check_twin(family, checkpoint, twin, ids, whole)


def window_crossing(kv: KVSpec) -> int:
    """Tokens of a prompt that leaves its largest window behind; 0 where there is none."""
    return max((layer.window + BEYOND for layer in kv.layers if isinstance(layer, SlidingKV)), default=0)


def _check_reference(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    if want.shape != got.shape:
        raise broken("reference", f"it returns {list(want.shape)}, the family {list(got.shape)}")
    error, largest = np.abs(got - want), float(np.abs(want).max())
    if not error.max() <= tolerance * largest:  # a NaN of the reference is no agreement
        wrong = ~(error <= tolerance * largest)
        position, token = np.argwhere(wrong)[0]
        raise broken(
            "reference",
            f"first beyond {tolerance:g} of the largest logit {largest:g}: position {position}, logit {token} is "
            f"{got[position, token]}, the reference has {want[position, token]}; {wrong.sum()} of {wrong.size} are",
        )


def _check_pieces(loaded: LoadedFamily, prompt: np.ndarray, context: int) -> None:
    total = len(prompt)
    whole = loaded.logits(prompt, context=context)
    uneven = sorted({cut for cut in (1, total // 3 + 1) if 0 < cut < total})
    for what, cuts in (
        *((f"in pieces of {chunk}", list(range(chunk, total, chunk))) for chunk in CHUNKS),
        (f"in uneven pieces, cut at {uneven}", uneven),
    ):
        same_bits("pieces", what, loaded.logits(prompt, cuts, context=context), whole)
    last = loaded.run([prompt], [[Feed(0, 0, total)]], last_only=True, context=context)[0]
    same_bits("rows", "when the last token's logits alone are asked for", last, whole[-1:], start=total - 1)


def _check_company(loaded: LoadedFamily, ids: np.ndarray, whole: np.ndarray, vocab: int) -> None:
    total, half = len(ids), len(ids) // 2
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, vocab, half + 1), ids, rng.integers(0, vocab, total)]
    long, short = Feed(2, 0, total), Feed(0, 0, half + 1)
    together: list[tuple[str, Sequence[Sequence[Feed]]]] = [
        ("between two rows", [[short, Feed(1, 0, total), long]]),
        ("behind a longer row", [[long, Feed(1, 0, total)], [short]]),
    ]
    if half:
        late = [[Feed(2, 0, half), Feed(1, 0, half)], [Feed(1, half, total), Feed(2, half, total), short]]
        together.append(("in two pieces, in changing places beside other rows", late))
    for what, steps in together:
        same_bits("company", what, loaded.run(rows, steps)[1], whole)


def _check_every_weight_counts(
    family: ModelFamily, checkpoint: Checkpoint, schema: WeightSchema, ids: np.ndarray
) -> None:
    """Tensors of experts count where every token goes to one of them, since a router may choose others here."""
    plain = LoadedFamily.load(WatchedFamily(family, schema, WatchedCheckpoint(checkpoint)), checkpoint)
    usual = plain.logits(ids)
    heard: dict[tuple[int, int], np.ndarray] = {}
    for name, place in schema.tensor_names(checkpoint.naming).items():
        weight, layer = place.weight, place.layer
        changed = LoadedFamily.load(plain.family, WatchedCheckpoint(checkpoint, changed=name))
        where = f" of layer {layer}" if weight.per_layer else ""
        if weight.role != "experts":
            if np.array_equal(changed.logits(ids), usual):
                raise broken("weights", f"{weight.name}{where} is not used: other values in {name} change no logit")
            continue
        for expert in range(weight.shape[0]) if place.expert is None else (place.expert,):
            alone = WatchedFamily(family, schema, WatchedCheckpoint(checkpoint), (layer, expert))
            if (layer, expert) not in heard:
                heard[layer, expert] = attrs.evolve(plain, family=alone).logits(ids[:HEARD])
            if np.array_equal(attrs.evolve(changed, family=alone).logits(ids[:HEARD]), heard[layer, expert]):
                raise broken(
                    "weights",
                    f"{weight.name}{where} is not used for expert {expert}: other values in {name} change no logit of "
                    "tokens that go to this expert alone",
                )


def _check_twin(
    family: ModelFamily, checkpoint: Checkpoint, twin: Checkpoint, ids: np.ndarray, whole: np.ndarray
) -> None:
    watched = WatchedCheckpoint(twin)
    config = family.parse_config(watched)
    schema = check_schema(family, twin, config)
    check_early_reads(watched, schema)
    got = LoadedFamily.load(WatchedFamily(family, schema, watched), watched).logits(ids)
    what = f"with the tensors of {twin.path.name} in format {twin.format}"
    same_bits("twin", what, got, whole, than=f"of {checkpoint.path.name} in format {checkpoint.format}")
