"""One cell: a generation that nobody times, then the repeats, each a row of figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import MlxcelError
from mlxcel.tools.bench.cases import case_params
from mlxcel.tools.bench.device import peak_bytes
from mlxcel.tools.bench.spent import Spent
from mlxcel.tools.bench.timing import MS, figures
from mlxcel.tools.bench.watch import Clock, WatchedRow, times

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.engine import Engine
    from mlxcel.tools.bench.asked import Asked
    from mlxcel.tools.bench.cells import Cell
    from mlxcel.tools.bench.clients import Client
    from mlxcel.tools.bench.traffic import Traffic
    from mlxcel.tools.model_choice import ChosenModel

Record = dict[str, Any]


@attrs.frozen
class Measuring:
    """What all cells of a run have in common. `copied` is the rate of the copy before them in 10^9 bytes a second, None
    where none was made."""

    asked: Asked
    config: EngineConfig
    chosen: ChosenModel
    platform: str
    copied: float | None
    say: Callable[[str], None]
    follow: Callable[[str], None]
    clock: Clock
    spent: Spent

    def rows(self, cell: Cell, client: Client, traffic: Traffic) -> Iterator[Record]:
        """Each record as its run ends."""
        asked, model = self.asked, client.model
        length = cell.prompt_tokens(model.facts.context)
        if length < cell.prompt_target_len:
            self.say(
                f"a prompt of {cell.prompt_target_len} tokens is cut to {length}: the context holds "
                f"{model.facts.context}, and {cell.max_tokens} are for the reply"
            )
        prompts = cell_prompts(self.chosen, model.tokenizer, model.facts.vocab, length, cell.batch)
        params = case_params(asked.sampling, max_tokens=cell.max_tokens)
        # Rows of a batch come to their first token one after the other, so that it goes through more programs than a
        # few tokens of it would show.
        few = cell.max_tokens if cell.batch > 1 else min(asked.warmup_tokens, cell.max_tokens)
        began, before = self.clock(), compiled(model.engine)
        with self.spent.on("warm-up"):
            client.run(prompts, params.clone(max_tokens=few))
        warmup_ms = (self.clock() - began) / MS
        words = f"{cell.path}, prompt of {length}, rows {cell.batch}"
        self.follow(f"{words}: warm-up {warmup_ms / 1e3:.2f} s, {compiled(model.engine) - before} programs compiled")
        for repeat in range(1, asked.repeats + 1):
            before = compiled(model.engine)
            with self.spent.on("runs"):
                ran = client.run(prompts, params)
            compiles = compiled(model.engine) - before
            seen = client.watch.rows()
            require_tokens(seen, cell)
            measured = figures(times(seen, ran.handed), length)
            # The i-th of the N - 1 decode steps reads `length` + i positions: this is their mean.
            size = traffic.step_bytes(cell.batch, length + cell.max_tokens / 2)
            rate = size / measured["ms_per_token"] / 1e6
            row = {
                "kind": "row",
                **asked.shape(cell, self.config),
                "repeat": repeat,
                "prompt_tokens": length,
                "generated_tokens": sum(len(row.tokens) for row in seen),
                **measured,
                "bytes_per_step": size,
                "achieved_gb_s": rate,
                "percent_of_copy": None if self.copied is None else 100 * rate / self.copied,
                "pieces": [row.pieces for row in seen],
                "kv_storage": model.engine.kv_storage,
                "attention_launches": client.watch.launches(),
                "compiles": compiles,
                "finish_cause": ", ".join(dict.fromkeys(ran.causes)),
                "warmup_ms": warmup_ms,
                "memory_peak_bytes": peak_bytes(self.platform, self.config.device),
            }
            self.follow(
                f"{words}: run {repeat} of {asked.repeats}, first token {row['ttft_ms']:.1f} ms, "
                f"{row['decode_tok_s']:.1f} tok/s a row"
            )
            yield {**row, "note": note_of(row)}


def cell_prompts(chosen: ChosenModel, tokenizer: Tokenizer, vocab: int, length: int, rows: int) -> list[np.ndarray]:
    """int32 [`length`] each: one prompt, whose first token is another one in each row, so that none can be taken for
    another's."""
    prompt = chosen.prompt(tokenizer, length)
    found = [prompt.copy() for _ in range(rows)]
    for place, ids in enumerate(found):
        ids[0] = (int(prompt[0]) + place) % vocab
    return found


def require_tokens(seen: Sequence[WatchedRow], cell: Cell) -> None:
    """MlxcelError where the engine resolved another number of tokens: a row that was preempted ran twice."""
    for place, row in enumerate(seen):
        if len(row.tokens) != cell.max_tokens:
            raise MlxcelError(
                f"row {place} resolved {len(row.tokens)} tokens of {cell.max_tokens}",
                hint="it began again, or ended early: a smaller --batch or a larger --kv-cache-budget may help",
            )


def note_of(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a row as a measurement of what was asked for; None for nothing."""
    notes = []
    if row["compiles"]:
        notes.append(f"{row['compiles']} programs compiled while the clock ran")
    routes = [route for phase in row["attention_launches"].values() for route in phase]
    if row["kv_storage"] == "paged" and not any("paged" in route for route in routes):
        notes.append("paged storage, no paged launch")
    return "; ".join(notes) or None


def compiled(engine: Engine) -> int:
    """Programs so far, 0 where nothing is compiled."""
    found = engine.compilations
    return 0 if found is None else found.warm_up + found.service
