"""The conformance kit: what the built-in families pass, and what it finds in families that break one law each."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from broken_families import ChangedContext, broken_by
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_gguf, write_tiny_llama

from mlxcel.core.family import ForwardContext
from mlxcel.core.kv import FullKV, KVSpec, RecurrentKV, SlidingKV
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.qwen import Qwen3
from mlxcel.plugins.families.tiny import Tiny
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.family_kit import check_family, logits_of
from mlxcel.testing.family_run import Feed, logits_of_rows
from mlxcel.testing.family_watch import WatchedContext


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return SafetensorsCheckpoint(
        write_tiny_llama(tmp_path_factory.mktemp("kit"), tie=False, vocab=64, tokenizer_size=260)
    )


def llama_over(context, **methods):
    """A Llama whose forward runs over `context(ctx)`."""

    def forward(self, ctx, config):
        return Llama.forward(self, context(ctx), config)

    return type("Changed", (Llama,), {"forward": forward, **methods})()


# --- families that pass ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", [Llama, Tiny])
def test_built_in_families_pass(tmp_path, family, tie):
    check_family(family(), SafetensorsCheckpoint(write_tiny_llama(tmp_path, tie=tie)))


def test_a_gguf_checkpoint_passes_with_its_transforms(tmp_path):
    check_family(Llama(), GgufCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf")))


def test_qwen3_passes(tmp_path):
    folder = write_tiny_llama(tmp_path, config_overrides={"model_type": "qwen3", "head_dim": 16})
    rng = np.random.default_rng(5)
    norms = {
        f"model.layers.{layer}.self_attn.{name}.weight": (1 + 0.1 * rng.standard_normal(16)).astype(np.float32)
        for layer in range(2)
        for name in ("q_norm", "k_norm")
    }
    write_safetensors(folder / "model.safetensors", {**tiny_weights(), **norms})
    check_family(Qwen3(), SafetensorsCheckpoint(folder))


def test_the_watching_context_has_every_op():
    ops = {name for name in vars(ForwardContext) if not name.startswith("_")}
    for name in ops - {"xp", "context"}:
        assert inspect.signature(getattr(WatchedContext, name)) == inspect.signature(getattr(ForwardContext, name))
    assert ops <= set(vars(WatchedContext))


# --- logits without an engine ----------------------------------------------------------------------------------------


def test_logits_come_back_row_by_row_and_in_order(checkpoint):
    rows = [[3, 4, 5, 6], [7, 8]]
    steps = [[Feed(1, 0, 1), Feed(0, 0, 3)], [Feed(0, 3, 4), Feed(1, 1, 2)]]
    found = logits_of_rows(Llama(), checkpoint, rows, steps)
    for ids, logits in zip(rows, found, strict=True):
        assert logits.tobytes() == logits_of(Llama(), checkpoint, ids).tobytes()
    last = logits_of_rows(Llama(), checkpoint, rows, steps, last_only=True)
    assert last[0].tobytes() == found[0][[2, 3]].tobytes()


@pytest.mark.parametrize("length", [127, 128, 129, 257])
def test_logits_of_long_prompts_do_not_know_their_cuts(checkpoint, length):
    ids = np.random.default_rng(length).integers(0, 64, length)
    assert logits_of(Llama(), checkpoint, ids, [1, 100]).tobytes() == logits_of(Llama(), checkpoint, ids).tobytes()


# --- bits ------------------------------------------------------------------------------------------------------------


def test_kv_whose_scale_depends_on_the_step_is_caught(checkpoint):
    class Scaled(ChangedContext):
        def attend(self, q, k, v, **options):
            return self.ctx.attend(q, k * np.float32(1 + 0.01 * len(k)), v, **options)

    message = broken_by(llama_over(Scaled), checkpoint)
    assert message.startswith("pieces: in pieces of 1, the logits at position 1 differ")
    assert "first at logit" in message


def test_a_trick_that_depends_on_the_place_in_the_step_is_caught(checkpoint):
    class Placed(ChangedContext):
        def embed(self, weight="embed"):
            x = self.ctx.embed(weight)
            # 31 tokens: the prompt and its two neighbours in one step, and no piece of the prompt alone.
            return x if len(x) != 31 else x + np.arange(len(x), dtype=np.float32)[:, None] * np.float32(1e-3)

    assert broken_by(llama_over(Placed), checkpoint).startswith("company: between two rows, the logits at position 0")


def test_a_mean_over_the_tokens_of_a_step_is_caught(checkpoint):
    class Centred(ChangedContext):
        def embed(self, weight="embed"):
            x = self.ctx.embed(weight)
            return x - x.mean(axis=0, keepdims=True)

    assert broken_by(llama_over(Centred), checkpoint).startswith("pieces: ")


# --- weights ---------------------------------------------------------------------------------------------------------


def test_an_unused_weight_is_named(checkpoint):
    class WithoutNorm(ChangedContext):
        def rms_norm(self, x, weight, **options):
            return x if weight == "mlp_norm" else self.ctx.rms_norm(x, weight, **options)

    message = broken_by(llama_over(WithoutNorm), checkpoint)
    assert "mlp_norm of layer 0 is not used" in message
    assert "model.layers.0.post_attention_layernorm.weight" in message


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (
            {"rms_norm": lambda self, x, weight, *, layer=None, **options: self.ctx.rms_norm(x, weight, **options)},
            "layer=None",
        ),
        ({"unembed": lambda self, x: self.ctx.unembed(x, "head")}, "unembed asks for the weight 'head'"),
        ({"embed": lambda self: self.ctx.embed("unembed")}, "whose role is 'linear' and must be 'embedding'"),
        ({"project": lambda self, x, group, *, layer: self.ctx.project(x, group, layer=0)}, "layer=0 inside layer 1"),
        ({"project": lambda self, x, group, *, layer: self.ctx.project(x, "kqv", layer=layer)}, "the group 'kqv'"),
        ({"select_rows": lambda self, x: x}, "select_rows kept None"),
        ({"select_rows": lambda self, x: self.ctx.select_rows(self.ctx.select_rows(x))}, "is called more than once"),
        (
            {
                "rms_norm": lambda self, x, weight, *, layer=None, **options: self.ctx.rms_norm(
                    x, weight, layer=1, **options
                )
            },
            "layer=1 inside layer 0",
        ),
        (
            {"unembed": lambda self, x: self.ctx.rms_norm(x, "final_norm", layer=0, eps=1.0)},
            "rms_norm of 'final_norm' gets layer=0, but the weight is outside the layers",
        ),
        (
            {"rope": lambda self, x, frequencies, **options: self.ctx.rope(x, frequencies.astype(np.float64))},
            "8 float64 frequencies",
        ),
        (
            {"rope": lambda self, x, frequencies, **options: self.ctx.rope(x, np.tile(frequencies, 2))},
            "16 float32 frequencies for",
        ),
        (
            {"attend": lambda self, q, k, v, **options: self.ctx.attend(q[:, :, :8], k, v, **options)},
            "asks with q [T, (4, 8)]",
        ),
        (
            {"attend": lambda self, q, k, v, **options: q.reshape(len(q), -1)},
            "layer 0 calls attend 0 times, wanted once",
        ),
        (
            {
                "attend": lambda self, q, k, v, layer, **options: self.ctx.state_scan(
                    lambda s, x: (s, x), (q,), layer=layer
                )
            },
            "layer 0 calls state_scan, its KV spec says FullKV",
        ),
        (
            {
                "rms_norm": lambda self, x, weight, *, layer=None, **options: self.ctx.layer_norm(
                    x, weight, "norm_bias", layer=layer, eps=1e-5
                )
            },
            "layer_norm asks for the weight 'norm_bias', which",
        ),
        (
            {"unembed": lambda self, x: self.ctx.unembed(x).astype(np.float64)},
            "forward returns float64 [12, 64], wanted float32",
        ),
        ({"unembed": lambda self, x: self.ctx.unembed(x)[:, :60]}, "rows: forward returns [12, 60], wanted [12, 64]"),
        ({"unembed": lambda self, x: self.ctx.unembed(x) * np.float32(np.inf)}, "numbers: logit 0 at position 0 is"),
    ],
)
def test_a_misused_op_is_named(checkpoint, context, words):
    assert words in broken_by(llama_over(type("Misused", (ChangedContext,), context)), checkpoint)


def test_a_tensor_read_behind_the_schema_is_caught(checkpoint):
    class Early(Llama):
        def parse_config(self, checkpoint):
            checkpoint.read("stray")
            return super().parse_config(checkpoint)

    class Late(Llama):
        def parse_config(self, checkpoint):
            self.kept = checkpoint
            return super().parse_config(checkpoint)

        def forward(self, ctx, config):
            self.kept.read("model.norm.weight")
            return super().forward(ctx, config)

    assert "forward reads tensor model.norm.weight" in broken_by(Late(), checkpoint)
    stray = SimpleNamespace(
        naming="hf",
        config=checkpoint.config,
        tensors={**checkpoint.tensors, "stray": attrs.evolve(checkpoint.tensors["model.norm.weight"], shape=(5000,))},
        read=lambda name, out=None: np.zeros(5000) if name == "stray" else checkpoint.read(name, out),
    )
    assert "parse_config reads stray, 5000 values" in broken_by(Early(), stray)


# --- the schema ------------------------------------------------------------------------------------------------------


def with_weight(changed, changes):
    """A Llama whose schema holds one weight with other fields."""

    class Changed(Llama):
        def schema(self, config):
            schema = super().schema(config)
            weights = [attrs.evolve(w, **changes) if w.name == changed else w for w in schema.weights]
            return attrs.evolve(schema, weights=tuple(weights))

    return Changed()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("k", {"name": "q"}, "names must be unique"),
        ("k", {"axes": "F"}, "axes 'F' and shape [32, 64] differ in length"),
        ("k", {"axes": "F", "shape": (32,)}, "k is [32], a linear weight is [out, in]"),
        ("k", {"shape": (64, 64)}, "k is [64, 64], the checkpoint's tensor model.layers.0.self_attn.k_proj.weight is"),
        ("k", {"names": {"gguf": "blk.{i}.k"}}, "k has no name under the checkpoint's naming 'hf'"),
        ("k", {"names": {"hf": "one.weight"}}, "{i} stands in a tensor's name exactly if"),
        ("k", {"names": {"hf": "layers.{i}.k"}}, "wants the tensor layers.0.k, which the checkpoint does not have"),
        ("k", {"names": {"hf": "model.layers.{i}.self_attn.v_proj.weight"}}, "share 19 tensor names"),
        ("down", {"group": "qkv"}, "share group 'qkv': their inputs must be of one size"),
        ("attn_norm", {"role": "bias", "bias_of": "nothing"}, "attn_norm is a bias of 'nothing'"),
        (
            "attn_norm",
            {"role": "bias", "bias_of": "k"},
            "attn_norm [64] of layers all cannot be the bias of a [32, 64]",
        ),
        ("k", {"names": {"hf": "model.layers.{i}.self_attn.k_proj.weight", "x": "{e}.{i}"}}, "k has {e} in a tensor's"),
        ("k", {"layers": (0,)}, "share group 'qkv': their inputs must be of one size, in the same layers"),
        ("k", {"layers": (1, 0)}, "k is of layers [1, 0]: they rise"),
        ("attn_norm", {"role": "experts"}, "weights of experts are [E, out, in]"),
        ("unembed", {"tied_to": "final_norm"}, "unembed is tied to 'final_norm'"),
        ("embed", {"shape": (60, 64)}, "embed has 60 rows, the config's vocab_size is 64"),
        ("k", {"transforms": {"hf": lambda rows: rows[:1]}}, "the transform of k makes [1, 64] of [32, 64]"),
    ],
)
def test_an_unsound_schema_is_caught(checkpoint, name, changes, words):
    assert words in broken_by(with_weight(name, changes), checkpoint)


def test_kv_of_another_number_of_layers_is_caught(checkpoint):
    family = llama_over(lambda ctx: ctx, kv_spec=lambda self, config: KVSpec(Llama().kv_spec(config).layers[:1]))
    assert broken_by(family, checkpoint) == "KV: the KV spec has 1 layers, the schema 2"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (SlidingKV(2, 16, 16, 0), "layer 1 keeps SlidingKV(kv_heads=2, k_dim=16, v_dim=16, window=0)"),
        (FullKV(0, 16, 16), "layer 1 keeps FullKV(kv_heads=0"),
        (RecurrentKV(()), "each number must be 1 or more"),
        (RecurrentKV(((4,), (0, 4))), "each number must be 1 or more"),
        (RecurrentKV(((4,),)), "layer 1 calls attend, its KV spec says RecurrentKV"),
    ],
)
def test_kv_that_keeps_nothing_is_caught(checkpoint, entry, words):
    family = llama_over(
        lambda ctx: ctx, kv_spec=lambda self, config: KVSpec((Llama().kv_spec(config).layers[0], entry))
    )
    assert words in broken_by(family, checkpoint)


def test_kv_of_another_shape_is_caught(checkpoint):
    def kv_spec(self, config):
        return KVSpec(tuple(attrs.evolve(layer, kv_heads=4) for layer in Llama().kv_spec(config).layers))

    assert broken_by(llama_over(lambda ctx: ctx, kv_spec=kv_spec), checkpoint).startswith("KV: layer 0 writes k")


def test_an_end_id_outside_the_vocabulary_is_caught(checkpoint):
    family = llama_over(lambda ctx: ctx, eos_ids=lambda self, config: frozenset({64}))
    assert broken_by(family, checkpoint) == "config: eos_ids has 64, ids are 0 to 63"


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 0), ("context", None), ("context", 2.0)])
def test_a_config_without_its_sizes_is_caught(checkpoint, field, value):
    class Sizeless(Llama):
        def parse_config(self, checkpoint):
            return attrs.evolve(super().parse_config(checkpoint), **{field: value})

    assert broken_by(Sizeless(), checkpoint) == f"config: {field} is {value!r}, it must be an integer of 1 or more"


def test_logits_of_some_rows_only_are_caught(checkpoint):
    """The whole prompt's, and its last token's alone, as the engine asks."""

    class Selecting(ChangedContext):
        def unembed(self, x):
            return self.ctx.unembed(x) * np.float32(1 + (len(x) == 1 and self.tokens == 70))

        def embed(self):
            x = self.ctx.embed()
            self.tokens = len(x)
            return x

    assert broken_by(llama_over(Selecting), checkpoint).startswith("rows: when the last token's logits alone are asked")

    short = llama_over(type("Short", (ChangedContext,), {"select_rows": lambda self, x: self.ctx.select_rows(x)[:-1]}))
    with pytest.raises(AssertionError, match="forward: 2 rows of logits for 3 tokens that are wanted"):
        logits_of(short, checkpoint, [1, 2, 3])


# --- the reference ---------------------------------------------------------------------------------------------------


def test_logits_that_differ_from_the_reference_are_located(checkpoint):
    def wrong(ids):
        logits = logits_of(Llama(), checkpoint, ids)
        logits[3, 7] += 1e-2
        return logits

    message = broken_by(Llama(), checkpoint, reference=wrong)
    assert "position 3, logit 7 is" in message
    assert message.endswith("; 1 of 768 are")
    check_family(Llama(), checkpoint, reference=wrong, tolerance=0.1)


@pytest.mark.parametrize("values", [np.zeros((12, 63)), np.full((12, 64), np.nan)])
def test_a_reference_of_another_shape_or_without_numbers_is_no_agreement(checkpoint, values):
    assert broken_by(Llama(), checkpoint, reference=lambda ids: values).startswith("reference: ")


# --- the twin --------------------------------------------------------------------------------------------------------


def test_the_same_values_in_another_format_pass(tmp_path):
    folder, file = write_tiny_llama(tmp_path / "hf"), write_tiny_gguf(tmp_path / "tiny.gguf")
    check_family(Llama(), SafetensorsCheckpoint(folder), twin=GgufCheckpoint(file))
    check_family(Llama(), GgufCheckpoint(file), twin=SafetensorsCheckpoint(folder))


def test_a_transform_that_does_not_undo_the_format_is_caught(tmp_path):
    """In one format alone nothing shows: the wrong rows are as good as others."""

    class Untransformed(Llama):
        def schema(self, config):
            schema = super().schema(config)
            return attrs.evolve(schema, weights=tuple(attrs.evolve(w, transforms={}) for w in schema.weights))

    folder, file = write_tiny_llama(tmp_path / "hf"), write_tiny_gguf(tmp_path / "tiny.gguf")
    check_family(Untransformed(), GgufCheckpoint(file))
    message = broken_by(Untransformed(), SafetensorsCheckpoint(folder), twin=GgufCheckpoint(file))
    assert message.startswith("twin: with the tensors of tiny.gguf in format gguf, the logits at position 1 differ")
    assert "those of hf in format safetensors" in message


def test_a_twin_of_another_size_is_caught(tmp_path):
    folder, file = write_tiny_llama(tmp_path / "hf"), write_tiny_gguf(tmp_path / "tiny.gguf", vocab=310)
    message = broken_by(Llama(), SafetensorsCheckpoint(folder), twin=GgufCheckpoint(file))
    assert "the logits are [12, 310], those of hf in format safetensors [12, 320]" in message
