"""How many rows an engine that serves gets, of what memory there is (spec C12)."""

from __future__ import annotations

import pytest
from hollow_checkpoint import SMOLLM2
from test_memory_plan import GIB, footprint, host

from mlxcel.config import EngineConfig
from mlxcel.kv_setup import SHORTER, Rows, plan_rows
from mlxcel.memory_plan import Memory

LLAMA_8B = SMOLLM2 | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


@pytest.mark.parametrize(("storage", "rows"), [("auto", 32), ("paged", 32), ("dense", 1)])
def test_c12_rows_that_share_a_pool_stay_where_not_even_one_has_its_whole_context(storage: str, rows: int) -> None:
    """Fewer would not have a longer one, and one row leaves the prompt cache no page. Dense rows would."""
    asked = EngineConfig.resolve({"kv_cache_budget": 1280 * 46_080, "kv_storage": storage}, environ={})
    plan = plan_rows(footprint(SMOLLM2), asked, Rows(32, fewer=True), host(GIB), dtype="float32")
    assert (plan.settings.rows, plan.admitted().positions) == (rows, 1280)


@pytest.mark.parametrize("gib", [20, 24, 24.5, 28, 32])
def test_c12_the_workspace_of_rows_is_not_what_costs_all_but_one(gib: float) -> None:
    """Without a budget fewer rows have a block or two of positions more each time, of tens of thousands."""
    memory = Memory.of_device(int(gib * GIB), int(gib * GIB))

    def planned(rows: Rows) -> tuple[int, int]:
        plan = plan_rows(footprint(LLAMA_8B), EngineConfig.resolve({}, environ={}), rows, memory, dtype="bfloat16")
        return plan.settings.rows, plan.admitted().positions

    (rows, positions), (_, alone) = planned(Rows(32, fewer=True)), planned(Rows(1, fewer=False))
    assert alone * (SHORTER - 1) // SHORTER <= positions <= alone
    assert rows == (16 if gib == 20 else 32)
