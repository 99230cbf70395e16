"""What sharing saves: the KV of 8 requests that begin with the same 1,024 tokens.

    python benchmarks/prefix_sharing.py [CHECKPOINT.gguf] [--sharers 8] [--shared 1024] [--json FILE]

The same requests run on paged KV with the prompt cache and without, until all of them decode together; then the pages
in use are counted, and multiplied by the size of the model's own arrays. The ids must be the same. Without a checkpoint
a toy of two layers takes the model's place: pages do not depend on it, bytes do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from provenance import provenance

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.engine import Engine
from mlxcel.core.events import Ended
from mlxcel.core.family import ModelFamily
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.tiny import Tiny
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.kv.prefix_cache import PrefixCache
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.self_test import CONFIG, seeded_checkpoint
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.text.detokeniser import Detokeniser
from mlxcel_reference_numpy.backend import NumpyBackend

OWN = 16  # tokens of each prompt behind what is shared
REPLY = 32
CHUNK = 512


@attrs.frozen
class Run:
    """One run of all requests: pages in use once every row decodes, bytes of one page, and what was said."""

    pages: int
    page_bytes: int
    computed: int  # prompt tokens
    ids: tuple[tuple[int, ...], ...]


def run(family: ModelFamily, checkpoint: Checkpoint, prompts: Sequence[np.ndarray], *, shared: bool) -> Run:
    config = family.parse_config(checkpoint)
    backend = NumpyBackend()
    backend.load(family, config, checkpoint, NoProgress())
    kv_spec = family.kv_spec(config)
    context, rows = max(map(len, prompts)) + REPLY, len(prompts)
    kv = PagedKV(kv_spec=kv_spec, slots=rows, context=context, page_size=backend.caps.page_sizes[0])
    engine = Engine(
        backend=backend,
        kv_spec=kv_spec,
        kv=kv,
        sampler=ChainSampler(vocab=config.vocab_size),
        finish=StandardFinish(stream=lambda spec: Detokeniser(ByteTokenizer()), steps={}),
        settings=EngineSettings(config.vocab_size, context, rows, CHUNK),
    )
    page_bytes = kv.page_size * kv_spec.bytes_per_position(4)
    cache = PrefixCache(
        kv=kv, kv_spec=kv_spec, key=engine.kv_key, level=engine.level, chunk=CHUNK, page_bytes=page_bytes
    )
    planner = ChunkedPlanner(chunk=CHUNK, level=engine.level, caps=backend.caps)
    settings = SchedulerSettings.resolve(backend.caps, engine.level, chunk=CHUNK)
    scheduler = Scheduler(engine, planner=planner, settings=settings, cache=cache if shared else None)
    params = SamplingParams(temperature=0, seed=0, max_tokens=REPLY, ignore_eos=True)
    replies = []
    for number, prompt in enumerate(prompts):  # the first one's prompt is there when the others come
        replies.append(scheduler.submit(Request((SequenceSpec(f"sharer {number}", prompt, params),))))
        while scheduler.stats().generation_tokens_total < 1:
            scheduler.tick()
    while len(engine.open_sequences) < rows or not all(engine.view(row).output for row in engine.open_sequences):
        scheduler.tick()
    stats = engine.kv_stats
    while scheduler.tick():
        pass
    results = [next(event.result for event in reply if isinstance(event, Ended)) for reply in replies]
    computed = sum(len(result.prompt_ids) - result.cached_tokens for result in results)
    engine.shutdown()
    return Run(stats.owned, page_bytes, computed, tuple(result.token_ids for result in results))


def measure(model: Path | None, sharers: int, shared: int) -> dict[str, Any]:
    family: ModelFamily = Tiny() if model is None else Llama()
    if model is None:
        checkpoint: Checkpoint = seeded_checkpoint(family, "mlxcel-tiny", {**CONFIG, "context": shared + OWN + REPLY})
    else:
        checkpoint = GgufCheckpoint(model)
    vocab = family.parse_config(checkpoint).vocab_size
    rng = np.random.default_rng(0)
    stem = rng.integers(0, vocab, shared)
    prompts = [np.concatenate([stem, rng.integers(0, vocab, OWN)]).astype(np.int32) for _ in range(sharers)]
    apart, together = (run(family, checkpoint, prompts, shared=sharing) for sharing in (False, True))
    if apart.ids != together.ids:
        raise SystemExit("the replies differ: sharing changed more than memory")
    return {
        "benchmark": "prefix_sharing",
        "model": "toy" if model is None else model.name,
        "sharers": sharers,
        "shared_tokens": shared,
        "page_bytes": apart.page_bytes,
        "apart": {"pages": apart.pages, "bytes": apart.pages * apart.page_bytes, "computed": apart.computed},
        "together": {
            "pages": together.pages,
            "bytes": together.pages * together.page_bytes,
            "computed": together.computed,
        },
        "saved_share": 1 - together.pages / apart.pages,
        **provenance(),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--sharers", type=int, default=8)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    found = measure(asked.model, asked.sharers, asked.shared)
    apart, together = found["apart"], found["together"]
    print(
        f"{found['sharers']} sharers of {found['shared_tokens']} tokens, {found['model']}: "
        f"{apart['bytes'] / 2**20:.1f} MiB apart, {together['bytes'] / 2**20:.1f} MiB together "
        f"({apart['pages']} and {together['pages']} pages), {found['saved_share']:.1%} saved; "
        f"{apart['computed']} and {together['computed']} prompt tokens computed   commit {found['commit']}"
    )
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
