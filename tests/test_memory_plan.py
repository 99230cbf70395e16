"""Budgets by hand: what a model takes, and how much of its context fits (spec V2, V12, V18 to V20)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hollow_checkpoint import GEMMA3, LFM2, MIXTRAL, SMOLLM2, parsed
from hypothesis import given
from hypothesis import strategies as st
from real_engine import real_engine

from mlxcel import host_memory, memory_plan
from mlxcel.config import EngineConfig
from mlxcel.core.backend import DeviceMemory
from mlxcel.core.checkpoint import TensorInfo
from mlxcel.core.kv import FullKV, KVLayout, RecurrentKV, SlidingKV
from mlxcel.errors import CapacityError, UsageError
from mlxcel.footprint import ITEM_SIZES, Footprint, only, window_token_bytes
from mlxcel.kv_setup import Rows, make_store, plan_rows
from mlxcel.memory_plan import Memory, MemorySettings, memory_here, plan_memory
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.self_test import SeededCheckpoint
from mlxcel_reference_numpy.storage import make_storage

GIB = 1 << 30
LEAST = 512 << 20  # of a device, kept for its runtime
ONE_ROW = MemorySettings(asked=0, chunk=2048, rows=1, kv_budget=None, dtype="float32")


def footprint(config: dict[str, Any]) -> Footprint:
    family, own, _ = parsed(config)
    return Footprint.of(family, own)


def host(free: int) -> Memory:
    return Memory.of_host(2 * free, free)


def test_smollm2_by_hand() -> None:
    model = footprint(SMOLLM2)
    layer = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576 + 2 * 576
    assert model.parameters == 49152 * 576 + 30 * layer + 576 == 134_515_008
    assert model.active == model.parameters
    assert model.weight_bytes("float32") == 538_060_032
    assert model.weight_bytes("bfloat16") == model.weight_bytes("float16") == 269_030_016
    assert model.kv.bytes_per_position(4) == 30 * 2 * 3 * 64 * 4 == 46_080
    # gate and up are the widest: 3072. Nine heads look at 8192 positions.
    by_hand = 2048 * (4 * 576 + 5 * 3072 // 2) * 4 + 3 * 9 * 8192 * 4 + 4 * 49152 * 4
    assert model.workspace_bytes("float32", context=8192, chunk=2048, rows=1) == by_hand


def test_gemma3_by_hand() -> None:
    """Layers 6, 12 and 18 of 18 see everything; the others have rings of ceil128(512 + 2048 - 1 + 16) = 2688."""
    model = footprint(GEMMA3)
    layer = 2 * 1024 * 640 + 2 * 256 * 640 + 3 * 2048 * 640 + 4 * 640 + 2 * 256
    assert model.parameters == 262144 * 640 + 18 * layer + 640 == 268_098_176
    assert model.kv.bytes_per_position(2) == 3 * 2 * 256 * 2 == 3072
    assert window_token_bytes(model.kv, 2) == 15 * 2 * 256 * 2 == 15_360
    assert model.kv.bytes_per_row(2, context=32768, chunk=2048) == 2688 * 15_360 == 41_287_680
    assert model.kv.bytes_per_row(2, context=1000, chunk=2048) == 1024 * 15_360


def test_a_mixture_counts_the_experts_that_a_token_meets() -> None:
    model = footprint(MIXTRAL)
    expert = 3 * 14336 * 4096
    shared = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 8 * 4096 + 2 * 4096
    ends = 2 * 32000 * 4096 + 4096  # an embedding and a head of its own
    assert model.parameters == ends + 32 * (shared + 8 * expert) == 46_702_792_704
    assert model.active == ends + 32 * (shared + 2 * expert) == 12_879_925_248


def test_recurrent_state_is_kept_twice() -> None:
    """Spec V11, V12: three convolutions remember two inputs of 1024 each."""
    model = footprint(LFM2)
    assert model.kv.bytes_per_position(4) == 2 * 8 * 64 * 4
    assert only(model.kv, RecurrentKV).bytes_per_row(4, context=128000, chunk=2048) == 3 * 2 * 2 * 1024 * 4
    assert only(model.kv, FullKV).layers == (FullKV(8, 64, 64),)


@pytest.mark.parametrize("config", [SMOLLM2, GEMMA3, LFM2], ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize(("rows", "context"), [(1, 128), (2, 700)])
def test_kv_bytes_are_those_of_the_real_arrays(config: dict[str, Any], rows: int, context: int) -> None:
    """Spec 2: budget against the sum of real array sizes."""
    model = footprint(config)
    settings = attrs.evolve(ONE_ROW, asked=context, rows=rows)
    plan = plan_memory(model, settings, host(64 * GIB))
    page = -(-context // 128) * 128
    storage = make_storage(KVLayout(model.kv, rows, page, False, rows, context, settings.chunk))
    assert plan.kv_bytes(page) == sum(array.nbytes for layer in storage for array in layer.arrays)


@pytest.mark.parametrize("chunk", [1, 64, 2048])
def test_the_chunk_decides_the_workspace(chunk: int) -> None:
    model = footprint(SMOLLM2)
    plan = plan_memory(model, attrs.evolve(ONE_ROW, chunk=chunk), host(64 * GIB))
    fixed = 4 * (3 * 9 * 8192 + 4 * 49152)
    assert plan.workspace == fixed + chunk * 9984 * 4
    assert plan.budget.bytes == (64 * GIB - plan.weights - plan.workspace) // 2


def test_a_context_shorter_than_the_chunk_bounds_the_workspace() -> None:
    plan = plan_memory(footprint(SMOLLM2), attrs.evolve(ONE_ROW, asked=100, chunk=1 << 30), host(64 * GIB))
    assert plan.workspace == 100 * 9984 * 4 + 4 * (3 * 9 * 100 + 4 * 49152)


SMALL = {"vocab_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 1024}
WIDE = {**SMALL, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1024}
MANY_HEADS = {**SMALL, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128}


@pytest.mark.parametrize(
    "config",
    [
        {**SMOLLM2, **WIDE},
        {**SMOLLM2, **MANY_HEADS},
        {**SMOLLM2, **WIDE, "vocab_size": 8192, "hidden_act": "gelu_pytorch_tanh"},
        {**GEMMA3, **WIDE, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
        {**MIXTRAL, **WIDE, "num_local_experts": 2},
        {**LFM2, **WIDE, "layer_types": ["conv", "full_attention"]},
    ],
    ids=["silu", "heads", "gelu", "windows", "experts", "recurrent"],
)
@pytest.mark.parametrize("chunk", [96, 192])
def test_the_workspace_is_what_a_step_takes(config: dict[str, Any], chunk: int) -> None:
    """The peak of a step's own arrays as Python traces them. The estimate takes the dearest activation and the widest
    product for all, so it may be above by a third; it must not be below by more than 2 %."""
    family, own, schema = parsed(config)
    tensors = {name: TensorInfo(name, place.shape, "F32", 0) for name, place in schema.tensor_names("hf").items()}
    checkpoint = SeededCheckpoint({"tie_word_embeddings": True, **config}, config["model_type"], tensors)
    real = real_engine(checkpoint, family, slots=1, context=512, chunk=chunk)
    ids = np.arange(chunk, dtype=np.int32)
    real.alone(ids[:4], 0, chunk)  # what NumPy imports at its first use is no part of a step
    row, plan = real.open(ids), real.plan(ids, chunk)
    tracemalloc.start()
    try:
        real.engine.prefill(row, plan)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    estimate = Footprint.of(family, own).workspace_bytes("float32", context=512, chunk=chunk, rows=1)
    assert 0.98 * peak < estimate < 1.34 * peak


# --- budgets -------------------------------------------------------------------------------------------------------


def test_v18_half_of_what_a_host_has_left() -> None:
    """Spec V18."""
    plan = plan_memory(footprint(SMOLLM2), ONE_ROW, host(2_000_000_000))
    assert plan.budget.bytes == (2_000_000_000 - 538_060_032 - 83_460_096) // 2
    assert plan.budget.explicit is False
    assert plan.admitted().positions == 8192


def test_v18_v19_a_device_by_the_formulas() -> None:
    """Spec V18, V19: floor(u * device) - weights - measured workspace - 3 % of the device; pages beside the state of
    every row."""
    settings = MemorySettings(asked=0, chunk=512, rows=32, kv_budget=None, dtype="bfloat16", paged=True)
    memory = Memory.of_device(80 * 10**9, 79 * 10**9, 0.85)
    plan = plan_memory(footprint(GEMMA3), settings, memory, weights=600_000_000, workspace=1_000_000_000)
    assert plan.budget.bytes == 68_000_000_000 - 600_000_000 - 1_000_000_000 - 2_400_000_000
    state = (512 + 512 - 1 + 16 + 127) // 128 * 128 * 15_360
    assert plan.pages(64) == (plan.budget.bytes - 32 * state) // (64 * 3072)
    assert plan.pages(16) == (plan.budget.bytes - 32 * state) // (16 * 3072)
    assert plan.context is not None
    assert plan.context.positions == 32768
    assert plan.tokens == (plan.budget.bytes - 32 * state) // (128 * 3072) * 128
    assert plan.tokens_per_row == 32768
    assert plan.rows_at_full_context == plan.budget.bytes // (32768 * 3072 + state)


def test_v18_the_margin_by_hand() -> None:
    """Spec V18: 3 % of the device, at least 512 MiB, or what the model's shapes need: its largest weight in float32, or
    the scores and sums of a step. Of the host, and beside a budget that was asked for, there is none."""
    # 9 query heads of 3 KV heads with 64 dims: an embedding of 49152 * 576 is the largest.
    small = footprint(SMOLLM2)
    assert small.runtime_bytes == 4 * max(49152 * 576, 7 * 64 * 49152 + 2 * 4096 * 8 * 3 * 66) == 139_984_896
    # All experts of a layer are read together: 8 * 14336 * 4096.
    assert footprint(MIXTRAL).runtime_bytes == 4 * 8 * 14336 * 4096
    assert footprint(GEMMA3).runtime_bytes == 4 * 262144 * 640
    for total, margin in ((2 * GIB, LEAST), (150 * 10**9, 4_500_000_000)):
        plan = plan_memory(small, ONE_ROW, Memory.of_device(total, total))
        assert plan.margin == margin
        assert plan.budget.bytes == int(0.9 * total) - plan.weights - plan.workspace - margin
        assert plan.needed == plan.weights + plan.workspace + margin + 8192 * 46_080
    mixture = plan_memory(footprint(MIXTRAL), ONE_ROW, Memory.of_device(300 * 10**9, 300 * 10**9))
    assert mixture.margin == 9_000_000_000
    less = plan_memory(footprint(MIXTRAL), ONE_ROW, Memory.of_device(40 * 10**9, 40 * 10**9))
    assert less.margin == 4 * 8 * 14336 * 4096
    assert plan_memory(small, ONE_ROW, host(64 * GIB)).margin == 0
    asked = attrs.evolve(ONE_ROW, kv_budget=8192 * 46_080)
    assert plan_memory(small, asked, Memory.of_device(2 * GIB, 2 * GIB)).margin == 0


def test_scores_of_a_large_vocabulary_and_wide_sums_are_part_of_the_margin() -> None:
    """Where they are more than the largest weight: a narrow model with many KV heads."""
    model = footprint(
        {**SMOLLM2, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    )
    assert model.runtime_bytes == 4 * (7 * 64 * 49152 + 2 * 4096 * 8 * 2 * 66)


@pytest.mark.parametrize(
    ("copies", "total"), [(2 * GIB, 80 * 10**9), (2 * GIB, 4 * 10**9), (1000, 4 * 10**9), (0, 10**10)]
)
def test_copies_of_rings_have_room_beside_the_kv_of_a_device(copies: int, total: int) -> None:
    """As many bytes as were told, or a quarter of the KV, whichever is less, lie beside it within the share."""
    settings = attrs.evolve(ONE_ROW, dtype="bfloat16", copies=copies)
    memory = Memory.of_device(total, total)
    plan = plan_memory(footprint(GEMMA3), settings, memory)
    left = memory.usable - plan.weights - plan.workspace - plan.margin
    assert 0 <= left - plan.budget.bytes - min(copies, plan.budget.bytes // 4) <= 1
    said = f"and {left - plan.budget.bytes} for the prompt cache's copies of windows"
    assert (said in plan.budget.origin) == (copies > 0)
    asked = attrs.evolve(settings, kv_budget=GIB)
    assert plan_memory(footprint(GEMMA3), asked, memory).budget.bytes == GIB
    assert (
        plan_memory(footprint(GEMMA3), settings, host(GIB)).budget
        == plan_memory(footprint(GEMMA3), attrs.evolve(settings, copies=0), host(GIB)).budget
    )


@pytest.mark.parametrize(
    ("config", "cached", "capacity", "copies"),
    [(GEMMA3, True, None, 2 * GIB), (GEMMA3, True, 5, 5), (GEMMA3, False, None, 0), (SMOLLM2, True, None, 0)],
)
def test_only_a_prompt_cache_copies_rings(
    config: dict[str, Any], cached: bool, capacity: int | None, copies: int
) -> None:
    own = EngineConfig.resolve({"prompt_cache_capacity_bytes": capacity}, environ={})
    memory = Memory.of_device(80 * 10**9, 80 * 10**9)
    plan = plan_rows(footprint(config), own, Rows(2, fewer=False), memory, dtype="bfloat16", cached=cached)
    assert plan.settings.copies == copies


def test_v18_a_budget_that_was_not_to_be_had_is_bounded() -> None:
    """Both numbers are told, and the context is lowered for it as for any budget."""
    memory = Memory.of_device(16 * GIB, 16 * GIB)
    whole = plan_memory(footprint(SMOLLM2), ONE_ROW, memory)
    bounded = plan_memory(footprint(SMOLLM2), ONE_ROW, memory, kv_most=1280 * 46_080)
    assert bounded.budget.bytes == 1280 * 46_080
    assert bounded.admitted().positions == 1280
    assert f"of which {1280 * 46_080} were to be had" in str(bounded.admitted().lowered)
    assert plan_memory(footprint(SMOLLM2), ONE_ROW, memory, kv_most=1 << 60).budget == whole.budget
    asked = attrs.evolve(ONE_ROW, kv_budget=8192 * 46_080)
    assert plan_memory(footprint(SMOLLM2), asked, memory, kv_most=1).budget.bytes == 8192 * 46_080


@pytest.mark.parametrize("share", [0.25, 0.9, 1.0])
def test_v18_the_share_of_a_device_is_the_options(share: float) -> None:
    """Spec V18: u is `--gpu-memory-utilization`. A host that cannot be read does not matter then."""
    config = EngineConfig.resolve({"gpu_memory_utilization": share, "dtype": "bfloat16"}, environ={})
    settings = MemorySettings.of(config, rows=1, dtype="bfloat16")
    memory = memory_here(settings, DeviceMemory(total=16 * GIB, free=16 * GIB))
    plan = plan_memory(footprint(SMOLLM2), settings, memory, weights=269_030_016, workspace=50_000_000)
    assert plan.budget.bytes == int(share * 16 * GIB) - 269_030_016 - 50_000_000 - LEAST
    assert plan.admitted().positions == 8192


def test_v18_of_a_device_others_hold_a_part_of() -> None:
    """What is free bounds the share: of 16 GiB, 0.9 are asked for and 2 GiB are left."""
    memory = memory_here(ONE_ROW, DeviceMemory(total=16 * GIB, free=2 * GIB))
    plan = plan_memory(footprint(SMOLLM2), ONE_ROW, memory, weights=538_060_032, workspace=100_000_000)
    assert plan.budget.bytes == 2 * GIB - 538_060_032 - 100_000_000 - LEAST
    full = plan_memory(footprint(SMOLLM2), ONE_ROW, memory_here(ONE_ROW, DeviceMemory(16 * GIB, 1000)))
    with pytest.raises(CapacityError, match=f"is 1000 of the device's {16 * GIB}, of which others hold the rest"):
        full.admitted()


def test_what_a_device_does_not_hold_is_named_with_what_it_holds() -> None:
    """Spec V18, V20: weights, workspace, margin, share and device; the largest that fits; what makes it more."""
    settings = attrs.evolve(ONE_ROW, asked=8192, dtype="bfloat16", device_share=0.5)
    taken = {"weights": 269_030_016, "workspace": 50_000_000}
    device = DeviceMemory(2 * 10**9, 2 * 10**9)
    plan = plan_memory(footprint(SMOLLM2), settings, memory_here(settings, device), **taken)
    left = 1_000_000_000 - 319_030_016 - LEAST
    fitting = left // (23_040 * 128) * 128
    with pytest.raises(UsageError) as caught:
        plan.admitted()
    said = caught.value.message
    for number in (8192 * 23_040, left, 269_030_016, 50_000_000, LEAST, "1000000000, 0.5 of", 2 * 10**9):
        assert str(number) in said
    assert str(caught.value.hint).startswith(
        f"the largest that fits is --ctx-size {fitting}; or raise --gpu-memory-uti"
    )
    least = plan_memory(footprint(SMOLLM2), attrs.evolve(settings, device_share=0.428), memory_here(
        attrs.evolve(settings, device_share=0.428), device), **taken)  # fmt: skip
    with pytest.raises(CapacityError, match="does not hold 128 positions") as caught_least:
        least.admitted()
    assert "--gpu-memory-utilization" in str(caught_least.value.hint)
    none = attrs.evolve(settings, device_share=0.42)
    with pytest.raises(CapacityError, match=r"0\.42 of the device's 2000000000: no token of KV fits") as caught_none:
        plan_memory(footprint(SMOLLM2), none, memory_here(none, device), **taken).admitted()
    assert f"50000000 bytes of workspace and {LEAST} of margin for the runtime" in caught_none.value.message
    assert "a larger --gpu-memory-utilization" in str(caught_none.value.hint)
    own = attrs.evolve(settings, kv_budget=23_040 * 1280)
    with pytest.raises(UsageError) as caught_own:
        plan_memory(footprint(SMOLLM2), own, memory_here(own, device), **taken).admitted()
    assert str(caught_own.value.hint) == "the largest that fits is --ctx-size 1280; or raise --kv-cache-budget"


def test_bytes_are_those_of_the_type() -> None:
    """Weights, positions, rings and workspace of a 16-bit type are half; scores and logits stay float32."""
    model = footprint(GEMMA3)
    wide, narrow = (
        plan_memory(model, attrs.evolve(ONE_ROW, dtype=dtype), host(64 * GIB)) for dtype in ("float32", "bfloat16")
    )
    assert wide.weights == 2 * narrow.weights
    assert wide.position_bytes == 2 * narrow.position_bytes
    assert wide.row_bytes(32768) == 2 * narrow.row_bytes(32768)
    floats = 4 * (3 * 4 * 32768 + 4 * 262144)
    assert wide.workspace - floats == 2 * (narrow.workspace - floats)


def test_v20_a_pool_needs_room_for_one_row_and_dense_rows_for_all() -> None:
    """Spec V20: with pages a lone row can reach N; dense rows have N positions each."""
    model = footprint(SMOLLM2)
    settings = attrs.evolve(ONE_ROW, rows=4, kv_budget=8192 * 46_080)
    pool = plan_memory(model, attrs.evolve(settings, paged=True), host(64 * GIB))
    dense = plan_memory(model, settings, host(64 * GIB))
    assert pool.admitted().positions == 8192
    assert dense.admitted().positions == 2048
    assert "instead of the model's 8192" in str(dense.admitted().lowered)
    for plan in (pool, dense):
        assert (plan.tokens, plan.tokens_per_row, plan.rows_at_full_context) == (8192, 2048, 1)


def test_rows_share_in_whole_blocks() -> None:
    settings = attrs.evolve(ONE_ROW, rows=3, kv_budget=1000 * 46_080)
    plan = plan_memory(footprint(SMOLLM2), settings, host(64 * GIB))
    assert (plan.tokens, plan.tokens_per_row, plan.rows_at_full_context) == (896, 256, 0)
    assert plan.admitted().positions == 256


def test_layers_without_pages_hold_any_number_of_tokens() -> None:
    model = attrs.evolve(footprint(GEMMA3), kv=only(footprint(GEMMA3).kv, SlidingKV))
    plan = plan_memory(model, attrs.evolve(ONE_ROW, rows=2, kv_budget=2 * 2688 * 30_720), host(64 * GIB))
    assert plan.admitted().positions == 32768
    assert (plan.pages(16), plan.tokens, plan.tokens_per_row, plan.rows_at_full_context) == (None, None, 32768, 2)
    less = plan_memory(model, attrs.evolve(plan.settings, kv_budget=100), host(64 * GIB))
    assert (less.context, less.tokens_per_row, less.rows_at_full_context) == (None, 0, 0)


@pytest.mark.parametrize("budget", [None, GIB])
@pytest.mark.parametrize("memory", [Memory.of_host(GIB, 600_000_000), Memory.of_device(680_000_000, 680_000_000)])
def test_weights_beyond_the_memory_are_refused_whatever_the_budget(budget: int | None, memory: Memory) -> None:
    plan = plan_memory(footprint(SMOLLM2), attrs.evolve(ONE_ROW, kv_budget=budget), memory)
    with pytest.raises(CapacityError, match="538060032 bytes of weights as float32 and 83460096 bytes of workspace"):
        plan.admitted()


def test_a_budget_that_was_asked_for_needs_no_memory_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise UsageError("the memory of this host cannot be read")

    monkeypatch.setattr(memory_plan, "host_memory", unknown)
    asked = attrs.evolve(ONE_ROW, kv_budget=46_080 * 1280)
    assert memory_here(asked, None) is None
    plan = plan_memory(footprint(SMOLLM2), asked, memory_here(asked, None))
    assert plan.admitted().positions == 1280
    with pytest.raises(UsageError, match="cannot be read"):
        memory_here(ONE_ROW, None)


def test_more_than_the_window_is_no_matter_of_memory() -> None:
    """Spec F4."""
    with pytest.raises(UsageError, match="window of 8192"):
        plan_memory(footprint(SMOLLM2), attrs.evolve(ONE_ROW, asked=8193), host(1))


@given(
    budget=st.integers(1, 2 * 8192 * 46_080),
    asked=st.sampled_from([0, 1, 127, 128, 129, 5000, 8192]),
    rows=st.integers(1, 3),
    paged=st.booleans(),
    config=st.sampled_from([SMOLLM2, GEMMA3]),
)
def test_what_is_admitted_fits_and_one_block_more_does_not(
    budget: int, asked: int, rows: int, paged: bool, config: dict[str, Any]
) -> None:
    """Spec V20: N is the largest there can be, and a row gets what is asked or is refused."""
    settings = MemorySettings(asked, 256, rows, budget, "bfloat16", paged)
    plan = plan_memory(footprint(config), settings, host(64 * GIB))
    if plan.context is None:
        assert plan.kv_bytes(128 if not asked else -(-asked // 128) * 128) > budget
        assert plan.refusal is not None
        return
    block = -(-plan.context.positions // 128) * 128
    assert plan.kv_bytes(block) <= budget
    if plan.context.positions != plan.wanted:
        assert not asked
        assert plan.kv_bytes(block + 128) > budget
    assert (
        plan.rows_at_full_context * plan.full_row_bytes
        <= budget
        < (plan.rows_at_full_context + 1) * (plan.full_row_bytes)
    )
    assert plan.tokens is not None
    assert plan.tokens * plan.position_bytes + rows * plan.row_bytes(plan.context.positions) <= budget
    if not paged:
        assert plan.tokens_per_row >= min(plan.context.positions, plan.tokens // rows // 128 * 128)


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /proc and the control group."""
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  6000 kB\n")
    return tmp_path


def test_memory_of_a_machine(machine: Path) -> None:
    assert host_memory.host_memory() == host_memory.HostMemory(8_192_000, 6_144_000)


@pytest.mark.parametrize(
    ("most", "used", "inactive", "expected"),
    [
        ("max", 5, 0, (8_192_000, 6_144_000)),
        ("1000000", 400_000, 0, (1_000_000, 600_000)),
        ("1000000", 900_000, 700_000, (1_000_000, 800_000)),
        ("1000000", 1_100_000, 0, (1_000_000, 0)),
        ("99000000", 0, 0, (8_192_000, 6_144_000)),
    ],
)
def test_memory_of_a_control_group(
    machine: Path, most: str, used: int, inactive: int, expected: tuple[int, int]
) -> None:
    """What a group leaves, if that is less; pages of files that nobody uses can be taken."""
    (machine / "memory.max").write_text(f"{most}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    (machine / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
    assert attrs.astuple(host_memory.host_memory()) == expected


def test_memory_without_proc_is_the_machines(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "meminfo").unlink()
    monkeypatch.setattr(host_memory.os, "sysconf", {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert host_memory.host_memory() == host_memory.HostMemory(12_288, 12_288)

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(host_memory.os, "sysconf", unknown)
    with pytest.raises(UsageError, match="cannot be read"):
        host_memory.host_memory()


def test_every_dtype_that_can_be_asked_for_has_a_size() -> None:
    from mlxcel.options import BY_NAME

    assert f"auto|{'|'.join(ITEM_SIZES)}" == BY_NAME["dtype"].kind.metavar


@pytest.mark.parametrize(
    ("memory", "apart", "least"),
    [
        (host, 10**9, 4 / 5),
        (lambda free: Memory.of_device(2 * free, free, 0.9), 10**8, 31 / 32),
    ],
    ids=["host", "device"],
)
def test_pages_do_not_follow_each_byte_of_free_memory(
    memory: Callable[[int], Memory], apart: int, least: float
) -> None:
    """Spec V19: programs are kept for a number of pages, and have to be found at the next start. What somebody asks for
    is taken as it is, and a lone row keeps its whole context."""
    model = footprint(SMOLLM2)
    settings = attrs.evolve(ONE_ROW, rows=4, paged=True)
    pages = {}
    for free in (42 * GIB, 42 * GIB + apart // 3, 42 * GIB + apart):
        plan = plan_memory(model, settings, memory(free))
        held = plan.pages(64)
        assert held is not None
        made = make_store(PagedKV, plan, model.kv, size=64, cached=True).num_pages
        assert least * held < made <= held
        pages[held] = made
    assert len(pages) == 3
    assert len(set(pages.values())) == 1
    plan = plan_memory(model, attrs.evolve(settings, kv_budget=5 * 10**8), memory(42 * GIB))
    assert make_store(PagedKV, plan, model.kv, size=64, cached=True).num_pages == plan.pages(64)
