"""The closed list of stage sets of the chain: docs/spec/engine.md S44, and S3, which makes it exact."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_rows import opened as open_row
from engine_rows import pieces, scripted, turn
from sampling_rows import FEATURE_SETS, Words, chain, flat_logits, no_carry, params, spec, told, traced
from test_processors import Affine
from test_sampling_tracing import primitives, random_rows

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.resolve_sampling import resolve_sampling
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling import draw as draw_module
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.ends import MOST
from mlxcel.plugins.sampling.stage_sets import GREEDY, WIDTHS, closed_sets

VOCAB, NAMED = 317, 300
LOGITS = flat_logits(len(FEATURE_SETS), VOCAB, 9)
ROWS = [params(**row) for row in FEATURE_SETS.values()]


def opened(sampler, row, prompt=(5, 6, 7, 5, 6), output=(5, 6, 9, 5)):
    state = sampler.open(spec(row, prompt, (7, 8)))
    for token in output:
        sampler.commit(state, token, None)
    return state


def drawn(xp, sampler, sampling, logits, carry):
    if xp is np:
        return sampler.draw(np, logits, sampling, carry)
    found = traced(sampler, sampling.stages, sampling.top_logprobs)(logits, dict(sampling.params), carry)
    return type(found)(*(None if field is None else np.asarray(field) for field in found))


def said(result, place, row):
    """All that the row at `place` of a draw gets to know, as bits."""
    moves = row.mirostat or row.adaptive_target > 0
    return (
        int(result.tokens[place]),
        int(result.status[place]),
        None if row.logprobs is None else told(result, place, row),
        result.observed[place].tobytes() if moves else None,
    )


def kind(sampling):
    """What chooses an executable of a step, beside R."""
    arrays = sorted((name, array.dtype.str, array.shape) for name, array in sampling.params.items())
    return sampling.stages, sampling.top_logprobs, tuple(arrays)


def taken(sampler, rows, **history):
    """The place in the list of the set that a step of these rows takes."""
    packed = sampler.pack(
        [opened(sampler, row, **history) for row in rows], range(len(rows)), [False] * len(rows), closed=True
    )
    return [kind(each) for each in sampler.stage_sets(len(rows))].index(kind(packed))


def some_carry(rng, rows):
    return Carry(rng.integers(0, NAMED, rows).astype(np.int32), rng.uniform(0.1, 6, rows).astype(np.float32))


@pytest.mark.parametrize("seed", range(12))
def test_a_superset_draws_the_bits_of_the_exact_set(seed):
    """Spec S44, S3: eight rows of any kinds through six tokens, some with a draw in flight, on NumPy."""
    rng = np.random.default_rng(seed)
    sampler = chain(VOCAB, NAMED)
    rows = [ROWS[place] for place in rng.integers(0, len(ROWS), 8)]
    states = [opened(sampler, row, rng.integers(0, NAMED, 40), rng.integers(0, NAMED, 9)) for row in rows]
    for step in range(6):
        pending = [
            bool(ahead) and sampler.closed(state) for ahead, state in zip(rng.random(8) < 0.3, states, strict=True)
        ]
        logits, carry = flat_logits(8, VOCAB, 3 + step), some_carry(rng, 8)
        positions = [state.history.length for state in states]
        exact = sampler.pack(states, positions, pending)
        closed = sampler.pack(states, positions, pending, closed=True)
        assert set(exact.stages) <= set(closed.stages)
        left, right = (drawn(np, sampler, each, logits, carry) for each in (exact, closed))
        for place, (row, state) in enumerate(zip(rows, states, strict=True)):
            assert said(left, place, row) == said(right, place, row), (step, place)
            observed = None if left.observed is None else float(left.observed[place])
            sampler.commit(state, int(left.tokens[place]), observed)


def test_a_superset_draws_the_bits_of_the_exact_set_in_traced_code():
    """Spec S44, S3: a row of every kind, in one step."""
    sampler = chain(VOCAB, NAMED)
    states = [opened(sampler, row) for row in ROWS]
    pending = [place % 3 == 0 and sampler.closed(state) for place, state in enumerate(states)]
    carry = some_carry(np.random.default_rng(0), len(ROWS))
    left, right = (
        drawn(jnp, sampler, sampler.pack(states, range(len(ROWS)), pending, closed=closed), LOGITS, carry)
        for closed in (False, True)
    )
    for place, (name, row) in enumerate(zip(FEATURE_SETS, ROWS, strict=True)):
        assert said(left, place, row) == said(right, place, row), name


@pytest.mark.slow
def test_company_that_brings_a_larger_set_changes_no_bit():
    """Spec S44: a row draws from every executable of the list that can serve it, and always the same."""
    sampler, rows, compared = chain(VOCAB, NAMED), len(ROWS), 0
    states = [opened(sampler, row) for row in ROWS]
    whole = sampler.pack(states, range(rows), [False] * rows, closed=True)
    everything = drawn(jnp, sampler, whole, LOGITS, no_carry(rows))
    smaller = {(each.stages, each.top_logprobs): each for each in sampler.stage_sets(rows)[:-1]}
    for example in smaller.values():  # of each the widest: width is no matter of arithmetic
        array_shapes = {name: array.shape for name, array in example.params.items()}
        fits = [place for place, row in enumerate(ROWS) if _fits(sampler, example, states[place])]
        cut = {name: whole.params[name][tuple(map(slice, shape))] for name, shape in array_shapes.items()}
        idle = np.array([place not in fits for place in range(rows)])
        arrays = {
            name: np.where(idle.reshape(-1, *[1] * (array.ndim - 1)), example.params[name], array)
            for name, array in cut.items()
        }
        found = drawn(jnp, sampler, attrs.evolve(example, params=arrays), LOGITS, no_carry(rows))
        for place in fits:
            assert said(found, place, ROWS[place]) == said(everything, place, ROWS[place]), (example.stages, place)
        compared += len(fits)
    assert compared > 2 * len(ROWS)


def _fits(sampler, example, state):
    """Whether a set has all that a row uses."""
    exact = sampler.pack([state], [0], [False])
    listed = -1 if example.top_logprobs is None else example.top_logprobs
    return set(exact.stages) <= set(example.stages) and (exact.top_logprobs is None or exact.top_logprobs <= listed)


def random_row(rng):
    """Some values of a row that uses everything."""
    rows = random_rows(rng)
    whole = attrs.asdict(rows[rng.integers(len(rows))], recurse=False)
    neutral = params(temperature=float(rng.choice([0, 0.8, 1])))
    kept = {
        name: value for name, value in whole.items() if rng.random() < 0.15 and name not in ("samplers", "mirostat")
    }
    row = neutral.clone(**kept)
    if rng.random() < 0.1:
        row = row.clone(mirostat=int(rng.integers(1, 3)))
    if rng.random() < 0.05:
        row = row.clone(logprobs=int(rng.choice([-1, 0, 5, 20, 200])))
    return row


def test_two_thousand_requests_need_no_executable_beside_the_list():
    """Spec S44: whatever they ask for and however long their lists are."""
    sampler, rng = ChainSampler(vocab=VOCAB, tokenizer=Words(NAMED)), np.random.default_rng(0)
    known = {kind(each) for each in sampler.stage_sets(4)}
    assert len(known) == len(sampler.stage_sets(4))
    found = set()
    for _ in range(500):
        states = [
            opened(sampler, random_row(rng), rng.integers(0, NAMED, 20), rng.integers(0, NAMED, rng.integers(200)))
            for _ in range(4)
        ]
        packed = sampler.pack(states, rng.integers(1, 2**20, 4).tolist(), rng.random(4) < 0.2, closed=True)
        found.add(kind(packed))
    assert found <= known
    assert len(found) > len(known) / 2


@pytest.mark.parametrize("vocab", [1, 7, 20, 64, 65, 317, 513, 5000, 128256])
def test_the_list_is_short_and_its_last_set_holds_everything(vocab):
    """Spec S44: a backend compiles each of them at each number of rows."""
    sets = closed_sets(["bias", "masks"], vocab)
    assert len(sets) == len(set(sets)) <= 14
    assert [(each.stages, each.width) for each in sets[:2]] == [(GREEDY, 0), (sets[1].stages, 0)]
    assert all(set(GREEDY) <= set(each.stages) for each in sets)
    assert sets[-1].top_logprobs == sets[-1].width == vocab
    assert all(set(each.stages) <= set(sets[-1].stages) for each in sets)
    assert {each.width for each in sets} == {0, *(width for width in WIDTHS if width < vocab), vocab}


@pytest.mark.parametrize(("client", "place"), [("lib", 1), ("cli", 0), ("srv", 1)])
def test_a_default_request_takes_the_cheapest_set_it_can(client, place):
    """Spec S44, D2: without penalties, masks and log-probabilities, whose arrays and searches cost others nothing."""
    row = resolve_sampling(client, fresh_seed=lambda: 3).params
    assert taken(chain(VOCAB, NAMED), [row]) == place


def test_a_greedy_step_sends_the_ends_that_its_rows_ignore_alone():
    assert {name: array.shape for name, array in chain(VOCAB, NAMED).stage_sets(3)[0].params.items()} == {
        "ends": (3, MOST)
    }


@pytest.mark.parametrize("client", ["lib", "cli", "srv"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_row_that_ignores_its_ends_takes_the_set_that_it_takes_without(client, temperature):
    """Spec S44, S16: so it costs no executable, and runs with others where their steps run together."""
    sampler = chain(VOCAB, NAMED)
    plain, ignoring = (
        resolve_sampling(
            client, ("request", {"temperature": temperature, "ignore_eos": ignores}), fresh_seed=lambda: 3
        ).params
        for ignores in (False, True)
    )
    assert taken(sampler, [ignoring]) == taken(sampler, [plain]) == (temperature > 0)
    assert sampler.memoryless(opened(sampler, ignoring))
    many = sampler.open(spec(ignoring, (5,), range(MOST + 1)))
    assert "masks" in sampler.pack([many], [0], [False]).stages


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_ignored_ends_are_removed_as_a_mask_removes_them(xp):
    """Spec S16, S15: every bit of a draw is that of the same row with the ids as false entries of `logit_bias`."""
    sampler = chain(VOCAB, NAMED)
    for count in (1, 2, MOST):
        ends = (*range(40, 40 + count), VOCAB, VOCAB + 5)  # some models name ends that they have no logits of
        few = [row.clone(ignore_eos=True) for row in ROWS]
        masked = [
            row.clone(logit_bias=[*row.logit_bias, *((token, None) for token in ends if token < VOCAB)]) for row in ROWS
        ]
        found = []
        for rows in (few, masked):
            states = [sampler.open(spec(row, (5, 6, 7), ends)) for row in rows]
            packed = sampler.pack(states, range(len(rows)), [False] * len(rows), closed=xp is jnp)
            assert rows is masked or "masks" not in sampler.pack(states[:1], [0], [False]).stages
            result = drawn(xp, sampler, packed, LOGITS, no_carry(len(rows)))
            found.append([said(result, place, row) for place, row in enumerate(rows)])
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("row", "output", "width"),
    [
        ({"frequency_penalty": 0.5}, 64, 64),
        ({"frequency_penalty": 0.5}, 65, 512),
        ({"repetition_penalty": 1.5, "repeat_last_n": -1}, 600, 4096),
        ({"xtc_probability": 0.5, "repeat_last_n": -1, "window_presence_penalty": 1.0}, 65, 4096),
        ({"frequency_penalty": 0.5}, 4097, 5000),
        ({"logit_bias": [[token, 1.0] for token in range(70)]}, 0, 512),
    ],
)
def test_the_longest_list_of_a_step_chooses_the_width_of_all(row, output, width):
    """Spec S44: one level for a step. The bits do not depend on it."""
    sampler = chain(5000)
    states = [opened(sampler, params(**row), output=range(output)), opened(sampler, params(repetition_penalty=1.2))]
    exact, closed = (sampler.pack(states, [9, 9], [False, False], closed=closed) for closed in (False, True))
    assert {closed.params[name].shape for name in ("repetition.ids", "dry.losses", "bias param ids")} == {(2, width)}
    logits = flat_logits(2, 5000, 9)
    left, right = (drawn(np, sampler, each, logits, no_carry(2)) for each in (exact, closed))
    assert left.tokens.tolist() == right.tokens.tolist()


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_rows_may_be_left_out_repeated_and_moved(xp):
    """`Sampler.pack`: a backend fills a width with rows that it has, and knows nothing of stages."""
    sampler = chain(VOCAB, NAMED)
    names = list(FEATURE_SETS)
    places = [names.index(name) for name in ("probabilities", "server", "xtc", "penalties", "dry")]
    rows = len(ROWS)
    states = [opened(sampler, ROWS[place]) for place in places]
    packed = sampler.pack(states, places, [False] * 5, closed=True)
    few = drawn(np, sampler, packed, LOGITS[places], no_carry(5))
    origin = np.array([4, 1, 3, 2, *[3] * (rows - 4)])
    moved = attrs.evolve(packed, params={name: array[origin] for name, array in packed.params.items()})
    found = drawn(xp, sampler, moved, LOGITS[places][origin], no_carry(rows))
    assert found.tokens.tolist() == few.tokens[origin].tolist()
    assert found.status.tolist() == [0] * rows


def test_no_set_sorts_the_vocabulary():
    """Spec S42, of every executable there is; those with everything run a stage only where a row uses it."""
    sampler = chain(VOCAB, NAMED)
    different = {(example.stages, example.top_logprobs): example for example in sampler.stage_sets(2)}
    for example in different.values():  # a width of lists is no matter of what runs

        def step(logits, arrays, example=example):
            return sampler.draw(jnp, logits, attrs.evolve(example, params=arrays), no_carry(2))

        found = list(primitives(jax.make_jaxpr(step)(LOGITS[:2], dict(example.params)).jaxpr))
        assert "argmax" in found
        assert not {name for name in found if "sort" in name or "top_k" in name}, example.stages
        # A search that depends on the platform is chosen while compiling, and runs nothing to choose.
        assert (found.count("cond") > found.count("platform_index")) == ("xtc" in example.stages)


def test_what_no_row_uses_is_not_run(monkeypatch):
    """Spec S3: such a stage costs nothing, though it is in the set."""

    def run(*_, **__):
        raise AssertionError("no row uses it")

    sampler = chain(VOCAB, NAMED)
    states = [opened(sampler, ROWS[0]), opened(sampler, params(xtc_probability=1.0, xtc_threshold=0.001))]
    packed = sampler.pack(states, [4, 5], [False] * 2, closed=True)
    assert {"mirostat_1", "typ_p", "dynatemp", "adaptive_p", "xtc"} <= set(packed.stages)
    monkeypatch.setattr(draw_module, "typical", run)
    for name in ("adaptive_p", "dynamic"):
        monkeypatch.setattr(draw_module, name, run)
    for name in ("by_rank", "by_surprise"):
        monkeypatch.setattr(draw_module.mirostat, name, run)
    assert drawn(np, sampler, packed, LOGITS[:2], no_carry(2)).status.tolist() == [0, 0]
    monkeypatch.setattr(draw_module, "xtc", run)
    with pytest.raises(AssertionError, match="no row uses it"):
        drawn(np, sampler, packed, LOGITS[:2], no_carry(2))


class Shift:
    """Adds `by` to every logit of an even id."""

    stage, history = "processors", 2

    def prepare(self, args, row):
        return {"by": np.float32(args["by"])}

    def apply(self, xp, logits, arrays, history):
        even = xp.arange(logits.shape[-1]) % 2 == 0
        return xp.where(even & (history[:, -1:] >= 0), logits + arrays["by"][:, None], logits)


@pytest.mark.slow
def test_a_processor_of_a_third_party_comes_on_top_of_a_set():
    """Spec S44, S48: it is no part of the list, and in no step that does not ask for it."""
    sampler = ChainSampler(vocab=VOCAB, tokenizer=Words(NAMED), processors={"shift": Shift()})
    asks = params(temperature=0, logits_processors=[{"name": "shift", "args": {"by": 50}}])
    states = [opened(sampler, row) for row in (asks, params(seed=4, top_k=3), params(repetition_penalty=1.4, seed=2))]
    known = {kind(each) for each in sampler.stage_sets(3)}
    assert kind(sampler.pack([states[1]] * 3, [1, 2, 3], [False] * 3, closed=True)) in known
    exact, closed = (sampler.pack(states, [4, 4, 4], [False, True, False], closed=closed) for closed in (False, True))
    (own,) = set(closed.stages) - {name for each in sampler.stage_sets(3) for name in each.stages}
    assert own == "processors.0.shift"
    order = [name for name in closed.stages if name in exact.stages]
    assert order == list(exact.stages)
    kinds = [(np, exact), (np, closed), (jnp, closed)]
    results = [drawn(xp, sampler, each, LOGITS[:3], no_carry(3)) for xp, each in kinds]
    assert results[0].tokens[0] % 2 == 0
    assert len({tuple(result.tokens.tolist()) for result in results}) == 1


def test_the_sets_are_there_before_any_row_and_their_arrays_take_no_memory():
    """Wide lists of rows that use none are one row, whatever the number of rows is."""
    sampler = ChainSampler(vocab=128256)
    widest = sampler.stage_sets(512)[-1]
    lists = [array for array in widest.params.values() if array.shape == (512, 128256)]
    assert len(lists) == 12
    assert {array.strides[0] for array in lists} == {0}
    assert not any(array.flags.writeable for array in lists)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_engine_packs_for_what_the_backend_is(compiled, monkeypatch):
    """`BackendCaps.compiled`: an interpreting backend gets the exact set."""
    made = scripted({"row": b"xy"})
    engine, backend = made.engine, made.backend
    plans, submit = [], backend.submit
    monkeypatch.setattr(backend, "_caps", attrs.evolve(backend.caps, compiled=compiled))
    monkeypatch.setattr(backend, "submit", lambda plan: plans.append(plan) or submit(plan))
    row, plan = open_row(engine, "row", temperature=0.5, repetition_penalty=1.1)
    turn(engine, *pieces(row, plan))
    sampling: SamplingArrays = plans[0].sampling
    exact = {"repetition", "temperature", "draw"}
    assert (set(sampling.stages) == exact) == (not compiled)
    assert exact <= set(sampling.stages)
    engine.close(row)


def test_samplers_whose_draws_are_one_function_are_equal():
    """What a backend compiled of one serves the other; newlines (S22) and processors are part of the function."""
    plain, again = ChainSampler(vocab=300), ChainSampler(vocab=300)
    assert plain == again
    assert hash(plain) == hash(again)
    texts, same = (ChainSampler(vocab=300, tokenizer=Words(290, {3: b"\n"})) for _ in range(2))
    assert texts == same
    assert texts != plain  # it knows newlines, and which ids are named
    assert ChainSampler(vocab=301) != plain
    assert ChainSampler(vocab=300, tokenizer=Words(290, {4: b"\n"})) != texts
    assert ChainSampler(vocab=300, processors={"own": Affine()}) != plain
