"""Prompts that outlive the process (docs/spec/engine.md V16, 8.1): the file, its damage, and whose it is."""

import os
import stat

import numpy as np
import pytest
from cache_rows import STORES, caching, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_family import layered_checkpoint
from real_engine import assert_same_bits
from tiny_checkpoint import write_tiny_gguf, write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.params import SamplingParams
from mlxcel.core.prefix import ModelIdentity
from mlxcel.core.request import SequenceSpec
from mlxcel.core.saved_prefix import pages_of, positions_of
from mlxcel.core.source import NoProgress
from mlxcel.errors import CacheFileError, UsageError
from mlxcel.load import load_model
from mlxcel.model_identity import END_BYTES, identify
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.kv.cache_file import read_cache_file
from mlxcel.plugins.kv.prefix_index import blake2b
from mlxcel.plugins.manager import PluginManager

LAYERS = {"full": ("full", "full"), "windows": ("window 16", "full")}


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("length", [17, 33, 71])
def test_h_j8_a_prefix_of_odd_length_goes_on_as_if_uninterrupted(backend, tmp_path, store, layers, length):
    """Spec V16: saved, and loaded into arrays that are full of NaN."""
    checkpoint, ids = layered_checkpoint(*LAYERS[layers]), ids_of(length)
    before, after = (caching(checkpoint, store=store) for _ in range(2))
    first = before.run(ids)
    assert before.cache.save(before.engine, tmp_path / "kept") == length + 4
    after.real.backend.fill_kv(np.nan)
    assert after.cache.load(after.engine, tmp_path / "kept") == length + 4
    for prompt in (ids, np.concatenate([ids, first.ids, ids[:5]])):
        ran, cold = after.run(prompt), caching(checkpoint, store=store).run(prompt)
        assert ran.cached >= length - 1
        assert_same_bits(cold.logits, ran.logits)
        assert ran.ids == cold.ids


def test_only_valid_positions_are_in_the_file(backend, tmp_path):
    """Two layers, K and V of two heads of 8 float32: 256 bytes a position, and nothing of the pages' tails."""
    made = caching()
    made.run(ids_of(21), 1)
    made.cache.save(made.engine, tmp_path / "kept")
    (saved,) = read_cache_file(tmp_path / "kept")
    assert [array.shape for array in saved.arrays] == [(21, 2, 8)] * 4
    assert sum(array.nbytes for array in saved.arrays) == 21 * 256


def test_a_tree_of_prompts_comes_back_as_one(backend, tmp_path):
    made, again = caching(), caching()
    prompts = [np.concatenate([ids_of(40), ids_of(20, seed=seed)]) for seed in (1, 2, 3)]
    for ids in prompts:
        made.run(ids, 1, salt="s", isolation=b"\x00key")
    made.cache.save(made.engine, tmp_path / "kept")
    again.cache.load(again.engine, tmp_path / "kept")
    assert again.cache.stats().pages == made.cache.stats().pages == 2 + 3 * 2
    for ids in prompts:
        assert again.run(ids, 1, salt="s", isolation=b"\x00key", keep=False).cached == 59
        assert again.run(ids, 1, salt="s", keep=False).cached == 0, "whose it is stays with it (spec X5)"


def test_the_file_is_private_and_replaced_as_a_whole(tmp_path):
    """Spec 8.1: under a temporary name, mode 0600."""
    made, file = caching(), tmp_path / "kept"
    file.write_bytes(b"of before")
    file.chmod(0o644)
    made.run(ids_of(40))
    made.cache.save(made.engine, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["kept"]


def test_a_file_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    made = caching()
    (tmp_path / "kept").mkdir()
    with pytest.raises(CacheFileError, match="could not be written"):
        made.cache.save(made.engine, tmp_path / "kept")
    assert os.listdir(tmp_path) == ["kept"]
    with pytest.raises(CacheFileError, match="cannot be read"):
        made.cache.load(made.engine, tmp_path / "none")


def saved_file(folder):
    made = caching()
    for seed in range(2):
        made.run(ids_of(40, seed=seed), 1)
    made.cache.save(made.engine, folder / "kept")
    return folder / "kept"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return saved_file(tmp_path_factory.mktemp("kept")).read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_and_nothing_is_taken(tmp_path_factory, whole, data):
    """A byte that changed, an end that is missing, bytes that follow."""
    kind = data.draw(st.sampled_from(["changed", "cut", "longer"]))
    if kind == "changed":
        at = data.draw(st.integers(0, len(whole) - 1))
        raw = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    elif kind == "cut":
        raw = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        raw = whole + data.draw(st.binary(min_size=1, max_size=80))
    file = tmp_path_factory.mktemp("bad") / "kept"
    file.write_bytes(raw)
    made = caching()
    with pytest.raises(CacheFileError, match=r"kept is no prompt cache that can be used"):
        made.cache.load(made.engine, file)
    assert made.engine.kv_stats.free == made.engine.kv_stats.total


BAD_HEADERS = [
    b"{}",
    b"[1]",
    b"[{}]",
    b"[" * 5000,
    b'[{"ids": [1], "key": {}, "prefilled": 0, "arrays": [], "state": null}]',
    b'[{"ids": ["a"], "key": {}, "prefilled": 0, "arrays": [], "state": null}]',
    b'[{"ids": [99999999999999], "key": {}, "prefilled": 0, "arrays": [], "state": null}]',
    b"\xff\xfe",
    b"",
]


@pytest.mark.parametrize("header", BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_a_header_that_makes_no_sense_is_damage_even_with_a_right_digest(tmp_path, header):
    (tmp_path / "kept").write_bytes(sealed(header, b""))
    with pytest.raises(CacheFileError, match="makes no sense"):
        read_cache_file(tmp_path / "kept")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"[21, 2, 8]", b"[2147483647, 2147483647, 8]"),
        (b"[21, 2, 8]", b"[-21, 2, 8]"),
        (b"[21, 2, 8]", b"[20, 2, 8]"),
        (b"[21, 2, 8]", b"[42, 8]"),
        (b'"float32", [21', b'"object", [21'),
        (b'"prefilled": 21', b'"prefilled": 22'),
        (b'"prefilled": 21', b'"prefilled": null'),
        (b'"version": 2', b'"other": 2'),
        (b'"salt": null', b'"salt": 1'),
        (b'"salt": null', b'"salt": ["s"]'),
        (b'"fingerprint": "', b'"fingerprint": 1, "rope": "'),
        (b'["float32", [21', b'["float32"], ["float32", [21'),
    ],
)
def test_a_header_is_checked_against_the_file_before_memory_is_taken(tmp_path, old, new):
    made = caching()
    made.run(ids_of(21), 1)
    made.cache.save(made.engine, tmp_path / "kept")
    raw = (tmp_path / "kept").read_bytes()
    end = 16 + int.from_bytes(raw[8:16], "little")
    header = raw[16:end]
    assert old in header
    (tmp_path / "kept").write_bytes(sealed(header.replace(old, new, 1), raw[end:-32]))
    with pytest.raises(CacheFileError, match="makes no sense"):
        read_cache_file(tmp_path / "kept")


def sealed(header, arrays):
    raw = b"MLXCELKV" + len(header).to_bytes(8, "little") + header + arrays
    return raw + blake2b(raw)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"identity": ModelIdentity(fingerprint="other")}, "no_match"),
        ({"identity": ModelIdentity(rope="yarn")}, "rope_regime_mismatch"),
        ({"identity": ModelIdentity(adapter="a")}, "adapter_mismatch"),
        ({"identity": ModelIdentity(backend="other")}, "kv_mode_mismatch"),
        ({"page_size": 32}, "layout_constraints"),
        ({"store": "dense"}, "mode_mismatch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_another_model_or_other_settings_is_refused(tmp_path, other, reason):
    """Spec V16: any difference."""
    file = saved_file(tmp_path)
    made = caching(**other)
    with pytest.raises(CacheFileError, match=reason):
        made.cache.load(made.engine, file)
    assert made.cache.stats().rejects[reason] == 1
    assert made.engine.kv_stats.free == made.engine.kv_stats.total


@pytest.mark.parametrize("other", [{"context": 128}, {"chunk": 16, "context": 2048}], ids=str)
@pytest.mark.parametrize("store", STORES)
def test_rings_of_another_size_are_refused(tmp_path, store, other):
    """Spec X2, V9: the context and the chunk choose how many positions a ring holds."""
    checkpoint = layered_checkpoint(*LAYERS["windows"])
    before = caching(checkpoint, store=store, context=512, chunk=256)
    before.run(ids_of(40))
    before.cache.save(before.engine, tmp_path / "kept")
    after = caching(checkpoint, store=store, **{"context": 512, "chunk": 256, **other})
    with pytest.raises(CacheFileError, match="layout_constraints"):
        after.cache.load(after.engine, tmp_path / "kept")
    assert after.run(ids_of(40)).cached == 0


def test_what_a_file_says_of_arrays_is_checked_against_the_model(tmp_path):
    made, other = caching(), caching()
    made.run(ids_of(21), 1)
    made.cache.save(made.engine, tmp_path / "kept")
    raw = (tmp_path / "kept").read_bytes()
    end = 16 + int.from_bytes(raw[8:16], "little")
    header = raw[16:end].replace(b"[21, 2, 8]", b"[21, 4, 4]")
    (tmp_path / "kept").write_bytes(sealed(header, raw[end:-32]))
    with pytest.raises(CacheFileError, match="do not fit"):
        other.cache.load(other.engine, tmp_path / "kept")
    assert other.engine.kv_stats.free == other.engine.kv_stats.total


def test_a_short_prompt_behind_a_long_one_is_saved_with_as_many_positions_as_it_has(tmp_path):
    """Windowed layers: a copy of the rings lies in the midst of a page that pieces computed as a whole."""
    checkpoint, ids = layered_checkpoint(*LAYERS["windows"]), ids_of(90)
    before, after = caching(checkpoint), caching(checkpoint)
    for length in (90, 41):
        before.run(ids[:length], 1)
    before.cache.save(before.engine, tmp_path / "kept")
    assert after.cache.load(after.engine, tmp_path / "kept") == 90 + 41
    for length in (90, 41):
        ran, cold = after.run(ids[:length]), caching(checkpoint).run(ids[:length])
        assert (ran.cached, ran.ids) == (length - 1, cold.ids)
        assert_same_bits(cold.logits, ran.logits)


def test_a_file_that_is_larger_than_the_store_gives_what_was_used_last(tmp_path):
    """Least recently used goes first (spec X12), and what is too long for the store goes alone."""
    made = caching()
    for seed, length in ((0, 40), (1, 40), (2, 120), (3, 30)):
        made.run(ids_of(length, seed=seed), 1)
    made.cache.save(made.engine, tmp_path / "kept")
    small = caching(pages=6, context=64, slots=2)
    assert small.cache.load(small.engine, tmp_path / "kept") == 40 + 40 + 30
    assert small.cache.stats().pages <= 6
    newest = [small.spec(ids_of(length, seed=seed)) for seed, length in ((3, 30), (1, 40))]
    assert [small.cache.match(spec).length for spec in newest] == [29, 39]


@pytest.mark.parametrize(("length", "size"), [(1, 16), (16, 16), (17, 16), (40, 32)])
def test_pages_and_positions_are_each_others_reverse(length, size):
    values = np.random.default_rng(0).random((length, 2, 3), np.float32)
    pages = pages_of(values, -(-length // size), size)
    assert pages.shape == (-(-length // size), 2, size, 3)
    assert pages[0, 1, 0, 2] == values[0, 1, 2]
    np.testing.assert_array_equal(positions_of(pages, length), values)


# --- identity --------------------------------------------------------------------------------------------------------


def identity_of(path, context=512):
    checkpoint = (GgufCheckpoint if path.suffix == ".gguf" else SafetensorsCheckpoint)(path)
    try:
        return identify(checkpoint, context)
    finally:
        checkpoint.close()


def changed_at(file, at):
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def test_the_identity_is_of_the_weights_and_not_of_their_place(tmp_path):
    """Spec X2: both ends of each file count, and where it lies does not."""
    first, second = write_tiny_llama(tmp_path / "a"), write_tiny_llama(tmp_path / "b")
    assert identity_of(first) == identity_of(second)
    (file,) = second.glob("*.safetensors")
    assert file.stat().st_size > END_BYTES
    changed_at(file, file.stat().st_size - 1)
    assert identity_of(first).fingerprint != identity_of(second).fingerprint
    gguf = write_tiny_gguf(tmp_path / "m.gguf")
    assert identity_of(gguf).fingerprint not in {identity_of(first).fingerprint, identity_of(second).fingerprint}
    before = identity_of(gguf)
    changed_at(gguf, gguf.stat().st_size - 1)
    assert identity_of(gguf).fingerprint != before.fingerprint


def test_scaled_positions_are_an_identity_of_their_own(tmp_path):
    """The base of a rope, its scaling, and where that may depend on N, N."""
    plain = write_tiny_llama(tmp_path / "a")
    based = write_tiny_llama(tmp_path / "b", config_overrides={"rope_theta": 5.0e5})
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    scaled = write_tiny_llama(tmp_path / "c", config_overrides=scaling)
    found = [identity_of(path) for path in (plain, based, scaled)]
    assert len({each.rope for each in found}) == 3
    assert identity_of(plain, 256) == found[0]
    assert identity_of(scaled, 256).rope != found[2].rope


# --- the loader ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manager():
    return PluginManager.load(only=(), trace=None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "m")


def loading(tiny, manager, scheduled=True, **options):
    given = {"model": str(tiny), "backend": "reference-numpy", "kv_cache_budget": 16 << 20, **options}
    config = EngineConfig.resolve(given, environ={"HOME": "/nonexistent"})
    return load_model(config, manager, NoProgress(), scheduled=scheduled)


def run_loaded(model, ids):
    spec = SequenceSpec("row", ids, SamplingParams(temperature=0, seed=0, max_tokens=6))
    row, match = model.cache.open(model.engine, spec)
    outcome = model.engine.prefill(row, model.planner.build(ids, adopted=match.length))
    while outcome.cause is None:
        outcome = model.engine.step([row])[0]
    output = model.engine.view(row).output
    model.cache.donate(model.engine, row)
    model.engine.close(row)
    return match.length, output


def test_a_file_is_written_at_the_end_and_read_at_the_start(tiny, manager, tmp_path, caplog):
    """Spec 8.1; a damaged one is left out with a warning."""
    ids, file = np.arange(5, 70, dtype=np.int32), tmp_path / "kept"
    with loading(tiny, manager, prompt_cache_file=str(file)) as model:
        cold = run_loaded(model, ids)
    with loading(tiny, manager, prompt_cache_file=str(file)) as model:
        warm = run_loaded(model, ids)
    assert (cold[0], warm[0]) == (0, 64)
    assert warm[1] == cold[1]
    assert not caplog.records
    file.write_bytes(b"damaged")
    with loading(tiny, manager, prompt_cache_file=str(file)) as model:
        assert run_loaded(model, ids) == cold
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(read_cache_file(file)) == 1, "the end wrote it anew"


def test_the_loader_chooses_the_store_by_the_rows(tiny, manager):
    """Spec D31, C12, V22: auto is dense for one row and paged above; what is asked for is obeyed."""
    with loading(tiny, manager) as model:
        assert (model.kv_storage, model.engine.settings.slots) == ("paged", 4)
        assert model.cache is not None
        assert model.engine.kv_stats.page_size == 16
    with loading(tiny, manager, scheduled=False) as model:
        assert (model.kv_storage, model.engine.settings.slots, model.cache) == ("dense", 1, None)
    with loading(tiny, manager, kv_storage="dense", max_num_seqs=3, enable_prefix_caching=False) as model:
        assert (model.kv_storage, model.engine.settings.slots, model.cache) == ("dense", 3, None)
    with loading(tiny, manager, scheduled=False, kv_storage="paged", page_size=64) as model:
        assert (model.kv_storage, model.engine.kv_stats.page_size) == ("paged", 64)
        assert model.engine.kv_stats.total == 2048 // 64, "without a cache no more than the rows can fill"


def test_pages_are_what_the_budget_holds(tiny, manager):
    """Spec V19."""
    with loading(tiny, manager) as model:
        per_position = model.cache._kept._page_bytes // 16
        assert model.engine.kv_stats.total == (16 << 20) // (16 * per_position)


def test_a_page_size_that_the_backend_has_not_is_a_start_error(tiny, manager):
    """Spec V1."""
    with pytest.raises(UsageError, match="--page-size 48 is not one of this backend's"):
        loading(tiny, manager, page_size=48)


def test_fewer_rows_where_the_budget_holds_fewer_unless_they_were_asked_for(tiny, manager):
    """Spec C12: a dense row of 2048 positions of 512 bytes takes 1 MiB."""
    budget = {"kv_storage": "dense", "kv_cache_budget": 2 << 20}
    with loading(tiny, manager, **budget) as model:
        assert (model.engine.settings.slots, model.engine.settings.context) == (2, 2048)
    with loading(tiny, manager, max_num_seqs=4, **budget) as model:
        assert (model.engine.settings.slots, model.engine.settings.context) == (4, 1024)
