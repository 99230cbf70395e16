"""docs/write-a-family.md says what is so: its code runs, its table is the protocol."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_llama

from mlxcel.core.family import FamilySpec, ForwardContext, WeightSchema
from mlxcel.plugins.discovery import GROUP
from mlxcel.testing.family_kit import logits_of
from mlxcel_reference_numpy.context import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "write-a-family.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page's Python blocks make, run in order beside a checkpoint named `tiny-model`."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("page") / "tiny-model", tie=False)
    weights = tiny_weights(tie=False)
    rng = np.random.default_rng(9)
    for name in [name for name in weights if re.search(r"[qkv]_proj", name)]:
        bias = rng.standard_normal(len(weights[name])) * 0.3
        weights[name.replace(".weight", ".bias")] = bias.astype(np.float32)
    write_safetensors(folder / "model.safetensors", weights)
    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        for number, block in enumerate(blocks("python")):
            exec(compile(block, f"docs/write-a-family.md, Python block {number + 1}", "exec"), names)
    return names


def test_every_python_block_runs(written: dict[str, Any]) -> None:
    assert {"Acme1", "Acme2Config", "weights_of", "Acme2", "q", "checkpoint", "mlxcel_families"} <= set(written)


def test_every_block_is_of_a_language_that_is_checked() -> None:
    opened = re.findall(r"^```(.+)$", PAGE, re.MULTILINE)
    assert opened == [language for language in opened if language in ("python", "toml")]
    assert len(opened) == len(blocks("python")) + len(blocks("toml"))


def test_the_family_of_the_page_agrees_with_its_formula(written: dict[str, Any]) -> None:
    """The page's own kit call has no reference: one position needs none but its matrices, since it attends itself."""
    w = {name: written["checkpoint"].read(name).astype(np.float64) for name in written["checkpoint"].tensors}
    h = w["model.embed_tokens.weight"][5]

    def norm(x: np.ndarray, name: str) -> Any:
        return x / np.sqrt(np.mean(x * x) + 1e-5) * w[f"{name}.weight"]

    for layer in ("model.layers.0", "model.layers.1"):
        x = norm(h, f"{layer}.input_layernorm")
        v = np.repeat((w[f"{layer}.self_attn.v_proj.weight"] @ x).reshape(2, 16), 2, axis=0).reshape(-1)
        up = w[f"{layer}.mlp.up_proj.weight"] @ x
        h = (
            h
            + w[f"{layer}.self_attn.o_proj.weight"] @ v
            + w[f"{layer}.mlp.down_proj.weight"] @ (up / (1 + np.exp(-up)))
        )
    want = w["lm_head.weight"] @ norm(h, "model.norm")
    got = logits_of(written["Acme2"](), written["checkpoint"], [5])[0]
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_the_table_of_ops_is_the_protocol() -> None:
    """Every op with its exact parameters, and no op that is not there."""
    table = PAGE[PAGE.index("| op | gives |") : PAGE.index("## 4.")]
    shown = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    ops = []
    for name, member in vars(ForwardContext).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            ops.append(name)
            continue
        parameters = list(inspect.signature(member).parameters.values())[1:]
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        ops.append(f"{name}{inspect.Signature(plain)}")
    assert shown == ops


def test_the_activations_that_it_names_are_those_there_are() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| `activate(")]
    assert re.findall(r'`"(\w+)"`', line) == list(ACTIVATIONS)


def test_what_it_ships_is_a_family_spec_under_the_group(written: dict[str, Any]) -> None:
    (spec,) = written["mlxcel_families"]()
    assert isinstance(spec, FamilySpec)
    assert spec.claims("hf", "acme2")
    (project,) = map(tomllib.loads, blocks("toml"))
    assert list(project["project"]["entry-points"]) == [GROUP]
    assert isinstance(written["weights_of"](written["Acme2"]().parse_config(written["checkpoint"])), WeightSchema)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
