"""A family with a layer of each kind, for tests of windows, recurrent state and experts, and its formulas.

A config's `layers` lists kinds: "full" and "window N" attend, with " sinks" behind them over a learned score of each
head as well; "state" recurs; "+experts" behind one of them makes its MLP a mixture. `layered_logits` computes the same
from the formulas in float64, by a full mask and plain loops.
"""

import attrs
import numpy as np

from mlxcel.core.family import WeightSchema, WeightSpec
from mlxcel.core.kv import FullKV, KVSpec, RecurrentKV, SlidingKV
from mlxcel.self_test import seeded_checkpoint

HEADS, KV_HEADS, DIM = 4, 2, 8
HIDDEN, FFN, EXPERTS, TOP_K = 24, 20, 4, 2
TAPS = 3  # inputs that a state layer's convolution sees, its own included
EPS = 1e-5
FREQUENCIES = (100.0 ** (-np.arange(DIM // 2) / (DIM // 2))).astype(np.float32)


@attrs.frozen
class LayeredConfig:
    vocab_size: int
    context: int
    kinds: tuple[str, ...]  # without "+experts"
    experts: tuple[bool, ...]
    softcap: float
    renormalise: bool


class Layered:
    name = "layered"

    def parse_config(self, checkpoint):
        raw = checkpoint.config
        return LayeredConfig(
            vocab_size=raw.get("vocab_size", 61),
            context=raw.get("context", 512),
            kinds=tuple(kind.removesuffix("+experts") for kind in raw["layers"]),
            experts=tuple(kind.endswith("+experts") for kind in raw["layers"]),
            softcap=raw.get("softcap", 0.0),
            renormalise=raw.get("renormalise", True),
        )

    def schema(self, config):
        attending = tuple(i for i, kind in enumerate(config.kinds) if kind != "state")
        recurring = tuple(i for i, kind in enumerate(config.kinds) if kind == "state")
        sinking = tuple(i for i, kind in enumerate(config.kinds) if kind.endswith("sinks"))
        dense = tuple(i for i, mixture in enumerate(config.experts) if not mixture)
        mixed = tuple(i for i, mixture in enumerate(config.experts) if mixture)

        def linear(name, out, size, layers, group=None):
            return WeightSpec(name, "FD", (out, size), {"hf": f"{name}.{{i}}"}, group=group, layers=layers)

        def experts(name, out, size, pattern):
            return WeightSpec(name, "EFD", (EXPERTS, out, size), {"hf": pattern}, "experts", layers=mixed)

        def norm(name):
            return WeightSpec(name, "D", (HIDDEN,), {"hf": f"{name}.{{i}}"}, "norm")

        weights = [
            WeightSpec("embed", "VD", (config.vocab_size, HIDDEN), {"hf": "embed"}, "embedding", per_layer=False),
            norm("mixer_norm"),
            norm("mlp_norm"),
            WeightSpec("final_norm", "D", (HIDDEN,), {"hf": "final_norm"}, "norm", per_layer=False),
            WeightSpec("unembed", "VD", (config.vocab_size, HIDDEN), {"hf": "unembed"}, per_layer=False),
        ]
        if attending:
            weights += [
                linear("q", HEADS * DIM, HIDDEN, attending, "qkv"),
                linear("k", KV_HEADS * DIM, HIDDEN, attending, "qkv"),
                linear("v", KV_HEADS * DIM, HIDDEN, attending, "qkv"),
                linear("o", HIDDEN, HEADS * DIM, attending),
            ]
        if sinking:
            weights.append(WeightSpec("sinks", "H", (HEADS,), {"hf": "sinks.{i}"}, "array", layers=sinking))
        if recurring:
            weights += [
                linear("forget", HIDDEN, HIDDEN, recurring, "state"),
                linear("input", HIDDEN, HIDDEN, recurring, "state"),
                linear("output", HIDDEN, HIDDEN, recurring),
                WeightSpec("taps", "CD", (TAPS, HIDDEN), {"hf": "taps.{i}"}, "array", layers=recurring),
            ]
        if dense:
            weights += [
                linear("gate", FFN, HIDDEN, dense, "gate_up"),
                linear("up", FFN, HIDDEN, dense, "gate_up"),
                linear("down", HIDDEN, FFN, dense),
            ]
        if mixed:  # one tensor of all experts, and tensors of each, as formats have them
            weights += [
                linear("router", EXPERTS, HIDDEN, mixed),
                experts("expert_gate", FFN, HIDDEN, "expert_gate.{i}"),
                experts("expert_up", FFN, HIDDEN, "expert_up.{i}.{e}"),
                experts("expert_down", HIDDEN, FFN, "expert_down.{i}.{e}"),
            ]
        return WeightSchema(len(config.kinds), tuple(weights))

    def kv_spec(self, config):
        def layer(kind):
            if kind == "state":
                return RecurrentKV(((HIDDEN,), (TAPS - 1, HIDDEN)))
            if kind.startswith("full"):
                return FullKV(KV_HEADS, DIM, DIM)
            return SlidingKV(KV_HEADS, DIM, DIM, int(kind.split()[1]))

        return KVSpec(tuple(map(layer, config.kinds)))

    def eos_ids(self, config):
        return frozenset()

    def forward(self, ctx, config):
        def layer(i, h, kind):
            mixer, mixture = kind
            x = ctx.rms_norm(h, "mixer_norm", layer=i, eps=EPS)
            h = h + (self.recur(ctx, i, x) if mixer == "state" else self.attend(ctx, i, x, mixer, config.softcap))
            x = ctx.rms_norm(h, "mlp_norm", layer=i, eps=EPS)
            if mixture:
                (router,) = ctx.project(x, "router", layer=i)
                options = {"top_k": TOP_K, "activation": "silu", "renormalise": config.renormalise}
                return h + ctx.moe(x, router, layer=i, **options)
            gate, up = ctx.project(x, "gate_up", layer=i)
            return h + ctx.project(ctx.gated(gate, up, "silu"), "down", layer=i)[0]

        kinds = tuple(zip(config.kinds, config.experts, strict=True))
        h = ctx.select_rows(ctx.for_layers(layer, ctx.embed(), kinds))
        return ctx.unembed(ctx.rms_norm(h, "final_norm", eps=EPS))

    def attend(self, ctx, i, x, kind, softcap):
        q, k, v = ctx.project(x, "qkv", layer=i)
        q = ctx.rope(ctx.xp.reshape(q, (-1, HEADS, DIM)), FREQUENCIES)
        k = ctx.rope(ctx.xp.reshape(k, (-1, KV_HEADS, DIM)), FREQUENCIES)
        v = ctx.xp.reshape(v, (-1, KV_HEADS, DIM))
        sinks = {"sinks": "sinks"} if kind.endswith("sinks") else {}
        return ctx.project(ctx.attend(q, k, v, layer=i, scale=DIM**-0.5, softcap=softcap, **sinks), "o", layer=i)[0]

    def recur(self, ctx, i, x):
        taps = ctx.weight("taps", layer=i)

        def step(state, values):
            kept, before = state
            forget, entering = values
            seen = ctx.xp.concat((before, entering[None]))
            share = 1 / (1 + ctx.xp.exp(-forget))
            kept = share * kept + (1 - share) * ctx.xp.sum(seen * taps, axis=0)
            return (kept, seen[1:]), kept * entering

        return ctx.project(ctx.state_scan(step, ctx.project(x, "state", layer=i), layer=i), "output", layer=i)[0]


def layered_checkpoint(*layers, **config):
    """Seeded weights for these kinds of layers."""
    return seeded_checkpoint(Layered(), "layered", {"layers": layers, **config})


def layered_logits(checkpoint, ids):
    """float64 logits [T, V] of the whole prompt, from the formulas."""
    config = Layered().parse_config(checkpoint)
    w = {name: checkpoint.read(name).astype(np.float64) for name in checkpoint.tensors}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight

    def silu(x):
        return x / (1 + np.exp(-x))

    h = w["embed"][np.asarray(ids)]
    for i, (kind, mixture) in enumerate(zip(config.kinds, config.experts, strict=True)):
        x = norm(h, w[f"mixer_norm.{i}"])
        if kind == "state":
            h = h + _recurrence(w, i, x) @ w[f"output.{i}"].T
        else:
            window = len(ids) if kind.startswith("full") else int(kind.split()[1])
            h = h + _masked_attention(w, i, x, window, config.softcap) @ w[f"o.{i}"].T
        x = norm(h, w[f"mlp_norm.{i}"])
        if not mixture:
            h = h + (silu(x @ w[f"gate.{i}"].T) * (x @ w[f"up.{i}"].T)) @ w[f"down.{i}"].T
            continue
        after = []
        for token in x:
            scores = w[f"router.{i}"] @ token
            shares = np.exp(scores) / np.exp(scores).sum()
            best = sorted(range(EXPERTS), key=lambda e: (-shares[e], e))[:TOP_K]
            total = sum(shares[e] for e in best) if config.renormalise else 1.0
            y = np.zeros(HIDDEN)
            for e in best:
                inner = silu(w[f"expert_gate.{i}"][e] @ token) * (w[f"expert_up.{i}.{e}"] @ token)
                y += shares[e] / total * (w[f"expert_down.{i}.{e}"] @ inner)
            after.append(y)
        h = h + np.array(after)
    return norm(h, w["final_norm"]) @ w["unembed"].T


def _masked_attention(w, i, x, window, softcap):
    """[T, H * d]: every score, and then a mask."""
    count = len(x)
    angle = np.arange(count)[:, None, None] * FREQUENCIES.astype(np.float64)

    def turned(y):
        first, second = np.split(y, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    q = turned((x @ w[f"q.{i}"].T).reshape(count, HEADS, DIM))
    k = turned((x @ w[f"k.{i}"].T).reshape(count, KV_HEADS, DIM))
    v = (x @ w[f"v.{i}"].T).reshape(count, KV_HEADS, DIM)
    distance = np.arange(count)[:, None] - np.arange(count)
    seen = (distance >= 0) & (distance < window)
    mixed = np.empty((count, HEADS, DIM))
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        scores = q[:, head] @ k[:, own].T / np.sqrt(DIM)
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.where(seen, np.exp(scores), 0)
        beside = np.exp(w[f"sinks.{i}"][head]) if f"sinks.{i}" in w else 0.0
        mixed[:, head] = weights @ v[:, own] / (weights.sum(axis=-1, keepdims=True) + beside)
    return mixed.reshape(count, -1)


def _recurrence(w, i, x):
    """[T, D]: a gated average of a short convolution."""
    entering = x @ w[f"input.{i}"].T
    padded = np.concatenate([np.zeros((TAPS - 1, HIDDEN)), entering])
    kept, outputs = np.zeros(HIDDEN), []
    for token, forget in enumerate(x @ w[f"forget.{i}"].T):
        share = 1 / (1 + np.exp(-forget))
        mixed = sum(w[f"taps.{i}"][tap] * padded[token + tap] for tap in range(TAPS))
        kept = share * kept + (1 - share) * mixed
        outputs.append(kept * entering[token])
    return np.array(outputs)
