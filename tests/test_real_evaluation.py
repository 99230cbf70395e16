"""lm-eval's `local-completions` against this server, and the formulas (docs/spec/clients.md 3.13: 10, 8.3)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import reference_forward
from client_programs import program, run
from safetensors.numpy import load_file
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama
from tokenizers import Tokenizer

LINES = 20
TASK = """\
task: twenty_lines
dataset_path: json
dataset_kwargs:
  data_files:
    test: {lines}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
num_fewshot: 0
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TOLERANCE = 2e-5
"""Of a sum of up to some tens of log-probabilities: float32 against float64."""

APART = 5 * TOLERANCE
"""Choices of a line whose scores differ by less could change places."""


@attrs.frozen
class Line:
    context: str
    choices: tuple[str, ...]
    answer: int

    @classmethod
    def number(cls, n: int) -> Line:
        word = ("and", "the", "of", "in")[n % 4]
        choices = (f" {word} and the {n}", " on", f" is a line of {n * n}")
        return cls(f"Line {n} says that {word}", choices, n % len(choices))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    with running(model, backend="reference-numpy", max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="module")
def scores(model: Path) -> list[list[float]]:
    """The log-probability of each choice behind its context: a forward of the whole sequence, in float64."""
    tensors, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def score(context: str, choice: str) -> float:
        whole = tokenizer.encode(context + choice).ids
        begun = len(tokenizer.encode(context).ids)
        logits = reference_forward.forward(  # type: ignore[no-untyped-call]
            tensors, config, np.array(whole), dtype=np.float64
        )
        exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return math.fsum(exact[place - 1, whole[place]] for place in range(begun, len(whole)))

    return [[score(line.context, choice) for choice in line.choices] for line in map(Line.number, range(LINES))]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_h_h5_lm_eval_scores_a_task_as_the_formulas_do(
    server: ScriptServer, model: Path, scores: list[list[float]], tmp_path: Path, batch: int
) -> None:
    """H-H5: each likelihood, and the task's two figures; one prompt a request, and several."""
    lm_eval = program("lm_eval", "`pip install lm-eval[api] transformers` has it")
    lines = tmp_path / "lines.jsonl"
    asked = [Line.number(n) for n in range(LINES)]
    lines.write_text("".join(json.dumps(attrs.asdict(line)) + "\n" for line in asked))
    (tmp_path / "twenty_lines.yaml").write_text(TASK.format(lines=lines))
    about = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={model},max_length=512"
    words = ["run", "--model", "local-completions", "--model_args", about, "--tasks", "twenty_lines"]
    places = ["--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ran = run([lm_eval, *words, "--batch_size", batch, *places], tmp_path, **offline)
    assert ran.returncode == 0, ran.stderr[-2000:]

    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda each: each["doc_id"])
    theirs = [[float(score) for score, _ in sample["filtered_resps"]] for sample in found]
    assert theirs == [pytest.approx(line, abs=TOLERANCE) for line in scores]

    (results,) = (tmp_path / "out").rglob("results_*.json")
    told: dict[str, Any] = json.loads(results.read_text())["results"]["twenty_lines"]
    per_letter = [
        [value / len(choice) for value, choice in zip(line, each.choices, strict=True)]
        for line, each in zip(scores, asked, strict=True)
    ]
    for name, table in (("acc,none", scores), ("acc_norm,none", per_letter)):
        assert min(abs(a - b) for line in table for at, a in enumerate(line) for b in line[:at]) > APART
        right = sum(max(line) == line[each.answer] for line, each in zip(table, asked, strict=True))
        assert told[name] == pytest.approx(right / LINES)
