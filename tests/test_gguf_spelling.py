"""The GGUF form of the reference checkpoints: what each file must hold before any family reads it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from family_vectors import cases, config, tensors
from gguf_spelling import ARCHITECTURES, INTERLEAVED, UNSAID, gguf_cases, gguf_tensors, write_gguf


def test_every_case_is_written_or_refused_with_its_reason(tmp_path: Path) -> None:
    """And every architecture has a case, so that none is left untried."""
    assert set(UNSAID) <= set(cases())
    assert {config(case)["model_type"] for case in gguf_cases()} == set(ARCHITECTURES)
    for case, reason in UNSAID.items():
        with pytest.raises(ValueError, match=reason):
            write_gguf(case, tmp_path / "none.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", gguf_cases())
def test_the_file_holds_the_checkpoint(case: str, tmp_path: Path) -> None:
    """As the gguf package's own reader sees it: the tensors of the architecture, and as many values as were given."""
    reader = gguf.GGUFReader(write_gguf(case, tmp_path / "model.gguf"))
    kind = config(case)["model_type"]
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[ARCHITECTURES[kind]]}
    count = 0
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight").removesuffix(".bias")
        layer = stem.split(".")[1] if stem.startswith("blk.") else ""
        assert stem.replace(f"blk.{layer}.", "blk.{bid}.") in known
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        count += 0 if stem.startswith("rope_") else int(tensor.n_elements)
    given = tensors(case).items()
    assert count == sum(value.size for name, value in given if not name.startswith(("vision_", "multi_modal_")))
    assert reader.fields["general.architecture"].contents() == gguf.MODEL_ARCH_NAMES[ARCHITECTURES[kind]]


@pytest.mark.parametrize("kind", INTERLEAVED)
def test_pairs_that_turn_together_are_neighbours(kind: str) -> None:
    """Dims i and i + d/2 of a head become 2i and 2i + 1, in q and in k, and nowhere else."""
    case = gguf_cases(kind)[0]
    settings, given, written = config(case), tensors(case), gguf_tensors(case)
    heads = {"q": settings["num_attention_heads"], "k": settings["num_key_value_heads"]}
    for part, count in heads.items():
        rows = given[f"model.layers.1.self_attn.{part}_proj.weight"]
        found = written[f"blk.1.attn_{part}.weight"]
        dim = len(rows) // count
        for head in range(count):
            for pair in range(dim // 2):
                np.testing.assert_array_equal(found[head * dim + 2 * pair], rows[head * dim + pair])
                np.testing.assert_array_equal(found[head * dim + 2 * pair + 1], rows[head * dim + pair + dim // 2])
    np.testing.assert_array_equal(written["blk.1.attn_v.weight"], given["model.layers.1.self_attn.v_proj.weight"])


def test_experts_are_stacked_in_their_order() -> None:
    """Expert e of a stack is expert e of the checkpoint."""
    given, written = tensors("mixtral"), gguf_tensors("mixtral")
    for part, stack in {"w1": "gate", "w2": "down", "w3": "up"}.items():
        for expert in range(8):
            matrix = given[f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"]
            np.testing.assert_array_equal(written[f"blk.1.ffn_{stack}_exps.weight"][expert], matrix)


def test_gemma_norms_are_stored_as_what_they_multiply_by() -> None:
    """1 + w, also for q and k norms; the embedding is stored as it is."""
    given, written = tensors("gemma3-defaults"), gguf_tensors("gemma3-defaults")
    for gguf_name, name in {
        "blk.1.attn_q_norm.weight": "model.layers.1.self_attn.q_norm.weight",
        "blk.1.post_ffw_norm.weight": "model.layers.1.post_feedforward_layernorm.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        np.testing.assert_array_equal(written[gguf_name], given[name] + np.float32(1))
    np.testing.assert_array_equal(written["token_embd.weight"], given["model.embed_tokens.weight"])
