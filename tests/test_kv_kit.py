"""The kit for what a family keeps: what passes, and what it finds where one law each is broken."""

import attrs
import numpy as np
import pytest
from layered_family import Layered, LayeredConfig, layered_checkpoint
from tiny_checkpoint import write_tiny_llama

import mlxcel_reference_numpy.context as numpy_context
from mlxcel.core.kv import KVSpec
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.kv_kit import check_kv_spec
from mlxcel_reference_numpy.attention import attend_token, attend_window
from mlxcel_reference_numpy.context import NumpyContext

KINDS = ("full", "window 16", "state")


def broken_by(family, checkpoint):
    with pytest.raises(AssertionError) as caught:
        check_kv_spec(family, checkpoint)
    return str(caught.value)


# --- families that pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers", [("full",), ("window 1", "window 130"), ("state",), ("state", "window 16", "full+experts")], ids=" ".join
)
def test_every_kind_of_layer_passes(layers):
    """Spec 2 "Tests that must exist": dense = paged with NaN in free pages, rings, and a slot after an overrun."""
    check_kv_spec(Layered(), layered_checkpoint(*layers))


def test_a_built_in_family_passes(tmp_path):
    check_kv_spec(Llama(), SafetensorsCheckpoint(write_tiny_llama(tmp_path)))


@pytest.mark.parametrize("context", [1, 2, 3, 20, 128, 129])
def test_a_context_smaller_than_window_ring_and_prompt_passes(context):
    check_kv_spec(Layered(), layered_checkpoint("window 130", "window 16", "state", context=context))


# --- a KV spec that says something else than the arrays --------------------------------------------------------------


class Cheap(KVSpec):
    """Forgets what a position takes."""

    def bytes_per_position(self, itemsize):
        return 0


class NoRows(KVSpec):
    """Forgets what a row owns."""

    def bytes_per_row(self, itemsize, *, context, chunk):
        return 0


class OneCopy(KVSpec):
    """Counts the state of a row once."""

    def bytes_per_row(self, itemsize, *, context, chunk):
        return KVSpec(self.layers).bytes_per_row(itemsize, context=context, chunk=chunk) // 2


class Unwindowed(KVSpec):
    windowed = False


def keeping(spec):
    class Keeping(Layered):
        def kv_spec(self, config):
            return spec(super().kv_spec(config).layers)

    return Keeping()


@pytest.mark.parametrize(
    ("spec", "layers", "words"),
    [
        (Cheap, ("full",), "bytes: bytes_per_position gives 0 for 48 positions of context 512 and chunk 1"),
        (NoRows, ("window 16",), "bytes: bytes_per_row gives 0 for 2 rows of context 512 and chunk 1, the arrays take"),
        (OneCopy, ("state",), "bytes: bytes_per_row gives 576 for 2 rows of context 512 and chunk 1, the arrays take"),
        (Unwindowed, ("window 16",), "chunk: a piece of 2 tokens is taken where the chunk is 1"),
    ],
)
def test_a_spec_that_does_not_hold_is_caught(spec, layers, words):
    assert broken_by(keeping(spec), layered_checkpoint(*layers)).startswith(words)


def test_a_spec_that_refuses_what_fits_is_caught():
    windowed = type("Windowed", (KVSpec,), {"windowed": True})
    words = "chunk: a piece of 2 tokens is refused where the chunk is 1"
    assert broken_by(keeping(windowed), layered_checkpoint("full")) == words


# --- a family that keeps what it must not -----------------------------------------------------------------------------


def test_a_family_that_remembers_its_forwards_is_caught():
    class Remembering(Layered):
        forwards = 0

        def forward(self, ctx, config):
            self.forwards += 1
            return super().forward(ctx, config) * np.float32(1 + self.forwards % 7)

    assert broken_by(Remembering(), layered_checkpoint("full")).startswith("storage: in pieces that end at [1, 15")


def test_logits_that_are_no_numbers_are_no_agreement():
    class Nothing(Layered):
        def forward(self, ctx, config):
            return super().forward(ctx, config) * np.float32(np.nan)

    assert broken_by(Nothing(), layered_checkpoint("full")) == "storage: logit 0 at position 0 is nan"


# --- a backend that leaves traces: the kit sees them ------------------------------------------------------------------


def test_a_mask_by_multiplication_is_caught(monkeypatch):
    """Spec V6: 0 x NaN is NaN."""

    def multiplied(q, keys, values, table, *rest):
        behind = values[table[-1]].sum() * np.float32(0)
        return attend_token(q, keys, values, table, *rest) + behind

    monkeypatch.setattr(numpy_context, "attend_token", multiplied)
    assert broken_by(Layered(), layered_checkpoint("full")).startswith("storage: ")


def test_a_ring_that_sees_too_far_is_caught(monkeypatch):
    """Spec V9, V10."""

    def long(q, keys, values, window, position, *rest):
        beyond = window + (position >= keys.shape[1] == 128)  # the ring of pieces of one token
        return attend_window(q, keys, values, beyond, position, *rest)

    monkeypatch.setattr(numpy_context, "attend_window", long)
    message = broken_by(Layered(), layered_checkpoint("window 16"))
    assert message.startswith("ring: in pieces of 1 round a ring of 128 positions, the logits at position 128 differ")


PLAIN_SCAN = NumpyContext.state_scan


def scan_with(change):
    """NumpyContext.state_scan with another plan."""

    def changed(self, step, inputs, *, layer):
        kept, self._plan = self._plan, change(self._plan)
        try:
            return PLAIN_SCAN(self, step, inputs, layer=layer)
        finally:
            self._plan = kept

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: attrs.evolve(plan, positions=plan.positions + 1),  # no row begins with zeros
        lambda plan: attrs.evolve(plan, state_copies=0 * plan.state_copies),  # no row reads what it wrote
    ],
)
def test_state_of_another_row_or_step_is_caught(monkeypatch, change):
    monkeypatch.setattr(NumpyContext, "state_scan", scan_with(change))
    assert broken_by(Layered(), layered_checkpoint("state")).startswith("storage: ")


class CountingScan:
    """A state_scan that keeps the copies' turn by itself, by slot: right until a step is dropped."""

    def __init__(self):
        self.turns = {}

    def __call__(self, context, step, inputs, layer):
        plan = context._plan
        begins = plan.positions[plan.query_start[:-1]] == 0
        for slot, first in zip(plan.slots.tolist(), begins.tolist(), strict=True):
            self.turns[slot] = 0 if first else self.turns[slot] + 1
        copies = np.array([self.turns[slot] % 2 for slot in plan.slots.tolist()], np.int32)
        return scan_with(lambda plan: attrs.evolve(plan, state_copies=copies))(context, step, inputs, layer=layer)


def test_a_backend_that_counts_the_dropped_step_is_caught(monkeypatch):
    """Spec V11."""
    counting = CountingScan()
    monkeypatch.setattr(
        NumpyContext, "state_scan", lambda self, step, inputs, *, layer: counting(self, step, inputs, layer)
    )
    message = broken_by(Layered(), layered_checkpoint("state"))
    assert message.startswith("overrun: behind 1 steps, and one that was dropped, the logits at position 1 differ")


def test_state_that_the_next_row_of_a_slot_finds_is_caught(monkeypatch):
    def warm(self, step, inputs, *, layer):
        """At position 0 the former row's state, unless it is NaN or there was none."""
        plan = self._plan
        kept = self._storage[layer].arrays[0]
        if (plan.positions[plan.query_start[:-1]] == 0).any() and np.isfinite(kept).all():
            inputs = (inputs[0] + kept[0, plan.slots[0]], *inputs[1:])
        return PLAIN_SCAN(self, step, inputs, layer=layer)

    monkeypatch.setattr(NumpyContext, "state_scan", warm)
    message = broken_by(Layered(), layered_checkpoint("state"))
    assert message.startswith("slot: in the slot of a row that ran 1 steps, and one that was dropped")


def test_the_configs_of_the_layered_family_are_what_the_tests_say():
    checkpoint = layered_checkpoint("window 16+experts", "state", softcap=2.0)
    expected = LayeredConfig(61, 512, ("window 16", "state"), (True, False), 2.0, True)
    assert Layered().parse_config(checkpoint) == expected
