"""Who waits for whom in a persistent step: no block waits for what comes later, nobody forgets what is still wanted.

A model of every block's waits, words and forgetting, by the step's own arithmetic of who does what; the kernel says the
same in `Products.run`, `Attention.run` and `Ends`. Orders are those that follow from waits alone, however fast each
block is: a vector clock a wait and a word.
"""

import attrs
import jax.numpy as jnp
import numpy as np
import pytest
from test_persistent_step import LLAMA_1B, LLAMA_8B, QWEN_17B, step_of

from mlxcel_jax_cuda.kernels.attention import BLOCK
from mlxcel_jax_cuda.kernels.attention_schedule import Tables
from mlxcel_jax_cuda.kernels.persistent_shape import ROWS
from mlxcel_jax_cuda.kernels.persistent_stream import Work
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import TILE

QWEN_06B = {"D": 1024, "H": 16, "K": 8, "d": 128, "ffn": 3072, "V": 151936}
LAYERS = 4
"""Each place of an exchange twice."""


@attrs.frozen
class Rows:
    """items: those of the schedule for each row. read: rows whose tokens products wait for."""

    items: tuple[int, ...]
    read: int


@attrs.frozen
class Event:
    """Of a block, in each layer: results it waits for, of this layer and of the one before, or what it then makes. A
    result is (what, which)."""

    waits: tuple = ()
    waits_before: tuple = ()
    makes: tuple = ()


def events_of(step, rows):
    """The events of each block in a layer, in its order."""
    blocks = jnp.arange(step.sms, dtype=jnp.int32)
    attention = items_of(step, rows, blocks)
    found = [[] for _ in range(step.sms)]
    for name in ("qkv", "attention", "o", "gate_up", "down"):
        units = None if name == "attention" else step.product_phases[name]
        own = attention if units is None else units_of(units, blocks)
        for block, events in enumerate(found):
            if units is None:
                events += attended(step, rows, own[block], block)
                continue
            for n, (item, part) in enumerate(own[block]):
                events += multiplied(step, rows, name, units, item, part, n)
    return found


def units_of(units, blocks):
    """(item, part) of each block."""
    counts, found = np.asarray(units.count_of(blocks)), [[] for _ in blocks]
    for n in range(counts.max()):
        item, part = map(np.asarray, units.unit(blocks, jnp.int32(n)))
        for block in np.flatnonzero(counts > n):
            found[block].append((int(item[block]), int(part[block])))
    return found


def items_of(step, rows, blocks):
    """(row, item, KV head) of each block."""
    ends = np.cumsum(rows.items)
    of_rows = jnp.asarray(np.stack([ends - rows.items, rows.items], 1), jnp.int32)
    work = Work(step, blocks, jnp.zeros((max(ends[-1], 1), 1), jnp.int32), of_rows, None, Tables(0, 1))
    counts, found = np.asarray(work.items), [[] for _ in blocks]
    for n in range(counts.max()):
        item, head = map(np.asarray, work.place(jnp.int32(n)))
        for block in np.flatnonzero(counts > n):
            row = int(np.searchsorted(ends, item[block], side="right"))
            found[block].append((row, int(item[block]), int(head[block])))
    return found


def multiplied(step, rows, name, units, item, part, n):
    """`Products.run`: a block's n-th unit of a phase."""
    weight = units.weight
    tiles = range(part * units.part_depth // TILE, (part + 1) * units.part_depth // TILE)
    normed = {"qkv": "down", "gate_up": "o"}.get(name)
    squares = [(normed, tile) for tile in range(step.hidden // TILE)] if normed else []
    tokens = [(normed or "gate_up", tile) for tile in tiles]
    if name == "o":
        group = step.group * step.chunks
        columns = sorted({(tile // group, tile % step.chunks) for tile in tiles})
        tokens = [("mixed", (row, *column)) for row in range(rows.read) for column in columns]
    if not rows.read or (weight.split == 1 and units.pieces == 1 and n):
        tokens = []  # in the latter case they are there since the block's first unit

    def wait(results):
        return [] if not results else [Event(waits_before=results) if name == "qkv" else Event(waits=results)]

    if part:
        return [*wait(tokens), Event(makes=[(f"{name}, a part", (item, part))])]
    early = weight.split == 1 and (weight.pair == 1 or units.pieces > 1)
    events = [*wait(squares), *wait(tokens)] if early else [*wait(tokens), *wait(squares)]
    events.append(
        Event(
            waits=[(f"{name}, a part", (item, other)) for other in range(1, weight.split)]
            + ([("o", item)] if name == "down" else []),
            waits_before=[("down", item)] if name == "o" else [],
            makes=[(name, item)],
        )
    )
    return events


def attended(step, rows, items, block):
    """`Attention.run`: a block's items, and what it merges."""
    events, before = [], None
    for row, item, head in items:
        if row != before:
            heads = [head * step.group + i for i in range(step.group)]
            heads += [step.heads + head, step.heads + step.kv_heads + head]
            events.append(Event(waits=[("qkv", each) for each in sorted({of // step.together for of in heads})]))
        before, whole = row, [("mixed", (row, head, chunk)) for chunk in range(step.chunks)]
        events.append(Event(makes=whole if rows.items[row] == 1 else [("partial", (item, head))]))
    firsts = np.cumsum(rows.items) - rows.items
    for number in range(block, step.attended, step.sms):
        pair, chunk = divmod(number, step.chunks)
        row, head = divmod(pair, step.kv_heads)
        if rows.items[row] != 1:
            own = range(firsts[row], firsts[row] + rows.items[row])
            events.append(Event(waits=[("partial", (item, head)) for item in own]))
            events.append(Event(makes=[("mixed", (row, head, chunk))]))
    return events


def fault(step, rows):
    """What is wrong with the order of a step, None where nothing is."""
    blocks = events_of(step, rows)
    names = {each: i for i, each in enumerate(each for events in blocks for event in events for each in event.makes)}
    words, R = list(names), len(names)

    def numbers(results, layer):
        return np.array([names[each] + (layer + 1) * R for each in results], int)

    def told(result):
        what, which = words[result % R]
        return f"{what} {which} of layer {result // R - 1}"

    lists = [
        [
            (np.concatenate([numbers(e.waits, layer), numbers(e.waits_before, layer - 1)]), numbers(e.makes, layer))
            for layer in range(LAYERS)
            for e in events
        ]
        for events in blocks
    ]
    there = np.zeros((LAYERS + 1) * R, bool)
    there[[names[each] for each in words if each[0] == "down"]] = True  # what goes before the first layer
    known = np.zeros(((LAYERS + 1) * R, step.sms), int)  # of a result: events of each block that came before it
    maker = np.zeros(len(there), int)
    came, read = np.zeros((step.sms, step.sms), int), []
    moved = True
    while moved:
        moved = False
        for block, events in enumerate(lists):
            while came[block, block] < len(events):
                waits, makes = events[came[block, block]]
                if not there[waits].all():
                    break
                read.append((block, waits, came[block].copy()))
                came[block] = np.maximum(came[block], known[waits].max(axis=0, initial=0))
                came[block, block] += 1
                there[makes], known[makes], maker[makes], moved = True, came[block], block, True
    for block, events in enumerate(lists):
        if came[block, block] < len(events):
            waits, _ = events[came[block, block]]
            return f"block {block} waits for {told(waits[~there[waits]][0])}, which nobody brings"
    for block, waits, before in read:
        following = waits[waits < LAYERS * R] + R
        lost = following[known[following, block] <= before[block]]
        if len(lost):
            return f"block {maker[lost[0]]} may forget {told(lost[0] - R)} before block {block} has seen it"
        earlier = waits[waits >= 2 * R] - R
        stale = earlier[before[maker[earlier]] < known[earlier, maker[earlier]]]
        if len(stale):
            return f"block {block} may take {told(stale[0] - R)} for that of layer {stale[0] // R}"
    return None


def launch_of(rows):
    """What launches of so many rows there are: padding alone, one row, all of one item, some of several."""
    half, padding = rows // 2, (0,) * (rows // 2 - 1)
    return {
        "padding alone": Rows((1,) + (0,) * (rows - 1), 1),  # its first row is taken as real
        "full": Rows((1,) * rows, rows),
        "long": Rows((17,) + (3,) * half + padding, half + 1),
        "a hole": Rows((1, 0) + (2,) * (rows - 2), rows),
    }


NAMED = {"llama-3.2-1b": LLAMA_1B, "llama-3.1-8b": LLAMA_8B, "qwen3-0.6b": QWEN_06B, "qwen3-1.7b": QWEN_17B}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NAMED)
def test_every_wait_ends_and_no_word_is_lost(name, rows):
    step = step_of(**NAMED[name], rows=rows)
    assert {what: fault(step, launch) for what, launch in launch_of(rows).items()} == dict.fromkeys(launch_of(rows))


def test_of_any_model_too():
    """Hidden sizes of 128 to 8192, 1 to 32 KV heads, few and many multiprocessors."""
    rng, tried = np.random.default_rng(6), 0
    while tried < 6:
        D, ratio = 128 * int(rng.choice([1, 2, 4, 6, 8, 12, 16, 20, 32, 40, 64])), int(rng.integers(2, 9))
        d, K, group = (int(rng.choice(each)) for each in ([64, 128], [1, 2, 4, 6, 8, 16, 32], [1, 2, 4, 8]))
        rows, sms = int(rng.choice(ROWS)), int(rng.choice([9, 78, 132]))
        try:
            step = step_of(D, K * group, K, d, D * ratio // 2, rows=rows, sms=sms, normed=False)
        except ValueError:
            continue  # there is no such step
        tried += 1
        for what, launch in launch_of(rows).items():
            assert fault(step, launch) is None, (step, what)


@pytest.mark.parametrize("name", NAMED)
def test_a_launch_whose_first_row_is_not_taken_as_real_has_no_order(name):
    """Nobody waits for tokens then. Of qwen3-0.6b 48 blocks own no row tile of any product, and wait for nothing at
    all: they run through the layers and forget parts that nobody has seen, so that the launch never ends."""
    step, nobody = step_of(**NAMED[name]), Rows((0,) * 8, 0)
    assert "may forget" in fault(step, nobody)
    blocks = enumerate(events_of(step, nobody))
    free = [block for block, events in blocks if not any(event.waits or event.waits_before for event in events)]
    assert free == (list(range(48)) + list(range(96, 100)) if name == "qwen3-0.6b" else [])


def turns(step, block, blocks_of_keys):
    """What a block's compute warpgroup does with the steps of its ring in a layer, by their numbers: (it waits for one,
    None) and (None, one is free again). Of products it has two at a time, of a block of keys its values as well."""
    at = 0
    for name, units in step.product_phases.items():
        steps = units.steps * len(units_of(units, jnp.arange(step.sms, dtype=jnp.int32))[block])
        for number in range(at, at + steps):
            yield number, None
            if number > at:
                yield None, number - 1
        if steps:
            yield None, at + steps - 1
        at += steps
        for _ in range(blocks_of_keys if name == "qkv" else 0):
            both = range(at, at + 2 * BLOCK // STEP * step.chunks)
            yield from ((number, None) for number in both)
            yield from ((None, number) for number in both)
            at += len(both)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NAMED)
def test_the_ring_has_room_for_all_that_is_wanted_at_a_time(name, rows):
    """The memory warpgroup asks for a step once its slot is free: those before it, in their order."""
    step, free = step_of(**NAMED[name], rows=rows), 0
    for wanted, freed in turns(step, step.sms // 2, blocks_of_keys=3):
        if wanted is None:
            assert freed == free
            free += 1
        else:
            assert wanted - free < step.slots, f"step {wanted} has no slot before {free} is free"
    assert free
