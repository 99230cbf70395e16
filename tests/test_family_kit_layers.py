"""The conformance kit on families with windows, recurrent state and experts: what passes, and what it finds."""

import numpy as np
import pytest
from broken_families import ChangedContext, broken_by
from layered_family import Layered, layered_checkpoint, layered_logits

from mlxcel.testing.family_kit import check_family, logits_of

LAYERS = [
    ("window 2", "window 16"),
    ("window 130+experts", "full"),
    ("full sinks", "window 16 sinks"),
    ("state", "window 16", "state+experts", "full+experts"),
]


@pytest.mark.parametrize("layers", LAYERS, ids=" ".join)
def test_windows_state_and_experts_pass(layers):
    checkpoint = layered_checkpoint(*layers, softcap=4.0, renormalise=False)
    check_family(Layered(), checkpoint, reference=lambda ids: layered_logits(checkpoint, ids))


def layered_over(changed, kv_spec=None):
    """A Layered whose forward runs over `changed(ctx)`."""
    methods = {"forward": lambda self, ctx, config: Layered.forward(self, changed(ctx), config)}
    return type("Changed", (Layered,), methods | ({"kv_spec": kv_spec} if kv_spec else {}))()


def changed_context(**methods):
    return type("Misused", (ChangedContext,), methods)


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        (
            lambda self, *args, **options: self.ctx.moe(*args, gate="expert_up", **options),
            "expert_gate of layer 1 is not used for expert 0: other values in expert_gate.1 change",
        ),
        (
            lambda self, *args, **options: self.ctx.moe(*args, up="expert_gate", **options),
            "expert_up of layer 1 is not used for expert 0: other values in expert_up.1.0 change",
        ),
    ],
)
def test_an_expert_that_is_not_used_is_named(moe, words):
    """One tensor of all experts, or one of each: no other expert stands in for it."""
    family = layered_over(changed_context(moe=moe))
    assert words in broken_by(family, layered_checkpoint("full", "full+experts"))


def step_changed(change):
    """A context whose state_scan runs `change(step)`."""

    def state_scan(self, step, inputs, *, layer):
        return self.ctx.state_scan(change(step), inputs, layer=layer)

    return changed_context(state_scan=state_scan)


def in_place(step):
    def changed(state, values):
        (kept, before), y = step(state, values)
        state[0][...] = kept
        return (state[0], before), y

    return changed


def in_float64(step):
    def changed(state, values):
        (kept, before), y = step(state, values)
        return (kept.astype(np.float64), before), y

    return changed


def one_short(step):
    def changed(state, values):
        (kept, before), y = step((state[0], state[1]), values)
        return (kept, before[:1]), y

    return changed


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (step_changed(in_place), "KV: layer 0 changes the arrays that its step is given"),
        (step_changed(in_float64), "KV: layer 0 makes ['float64', 'float32', 'float32'] of float32"),
        (step_changed(one_short), "KV: layer 0 keeps state of [(24,), (1, 24)]"),
        (
            changed_context(for_layers=lambda self, body, x, kinds: self.ctx.for_layers(body, x, kinds[:1])),
            "layers: for_layers gets 1 kinds, the schema has 2 layers",
        ),
        (
            changed_context(moe=lambda self, x, router, **options: self.ctx.moe(x, router, **{**options, "top_k": 5})),
            "experts: layer 1 chooses 5 experts by logits [12, 4], wanted [12, 4] and 1 to 4",
        ),
        (
            changed_context(moe=lambda self, x, router, **options: self.ctx.moe(x, router[:, :3], **options)),
            "by logits [12, 3], wanted [12, 4]",
        ),
        (changed_context(weight=lambda self, name, layer: self.ctx.weight("taps")), "weight of 'taps' gets layer=None"),
        (changed_context(weight=lambda self, name, layer: self.ctx.weight("router", layer=layer)), "must be 'array'"),
    ],
)
def test_a_misused_op_of_state_or_experts_is_named(context, words):
    assert words in broken_by(layered_over(context), layered_checkpoint("state", "full+experts"))


def test_a_window_that_the_step_bounds_is_caught():
    """The whole prompt in one step sees what is behind the window; token by token it does not."""

    class Leaking(ChangedContext):
        def attend(self, q, k, v, **options):
            return self.ctx.attend(q, k + k.mean(axis=0) * np.float32(len(k) > 64), v, **options)

    assert broken_by(layered_over(Leaking), layered_checkpoint("window 70")).startswith("pieces: in pieces of 1,")


def test_a_family_may_choose_by_the_context_of_the_engine():
    """The same bits for every cut, under a small bound and under a large one."""

    def embed(self, weight="embed"):
        return self.ctx.embed(weight) * np.float32(1 + (self.ctx.context > 100))

    checkpoint = layered_checkpoint("window 16", context=300)
    family = layered_over(changed_context(embed=embed))
    check_family(family, checkpoint)
    ids = np.arange(20)
    assert logits_of(family, checkpoint, ids).tobytes() != logits_of(family, checkpoint, ids, context=300).tobytes()
