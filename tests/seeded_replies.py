"""Golden ids of seeded replies on one backend: the toy model `tiny` with seeded weights, one row of each kind.

    python tests/seeded_replies.py reference-numpy

writes tests/data/golden/seeded-BACKEND.json. A change of that file is a release note (docs/spec/engine.md S36).
"""

import json
import sys
from pathlib import Path

import numpy as np
from engine_rows import plan_for
from sampling_rows import FEATURE_SETS

from mlxcel.core.engine import Engine
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.plugins.families.tiny import Tiny
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.manager import PluginManager
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.self_test import CONFIG, seeded_checkpoint
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.text.detokeniser import Detokeniser

TOKENS = 16

PROMPT = b"once upon a time"

GOLDEN = Path(__file__).parent / "data" / "golden"


def seeded_replies(backend_name):
    """{name: ids} of every set of features, `TOKENS` each."""
    family = Tiny()
    checkpoint = seeded_checkpoint(family, "mlxcel-tiny", CONFIG)
    config, tokenizer = family.parse_config(checkpoint), ByteTokenizer()
    backends = PluginManager.load(only=(), trace=None).backends()
    backend = backends.load(backend_name)(device="cpu", dtype="auto", deterministic=False)
    backend.load(family, config, checkpoint, NoProgress())
    kv_spec = family.kv_spec(config)
    prompt = np.frombuffer(PROMPT, np.uint8).astype(np.int32)
    found = {}
    with Engine(
        backend=backend,
        kv_spec=kv_spec,
        kv=DenseKV(kv_spec=kv_spec, slots=1, context=config.context, page_size=16),
        sampler=ChainSampler(vocab=config.vocab_size, tokenizer=tokenizer),
        finish=StandardFinish(stream=lambda spec: Detokeniser(tokenizer), steps={}),
        settings=EngineSettings(config.vocab_size, config.context, 1),
    ) as engine:
        for name, fields in FEATURE_SETS.items():
            params = SamplingParams(**{"seed": 0, **fields}, max_tokens=TOKENS, ignore_eos=True)
            row = engine.open(SequenceSpec(name, prompt, params, tokenizer.eos_ids))
            engine.prefill(row, plan_for(prompt))
            while engine.view(row).ending is None:
                engine.step([row])
            found[name] = list(engine.view(row).output)
            engine.close(row)
    return found


def golden_file(backend_name):
    return GOLDEN / f"seeded-{backend_name}.json"


if __name__ == "__main__":
    replies = seeded_replies(sys.argv[1])
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(ids)}" for name, ids in replies.items())
    golden_file(sys.argv[1]).write_text("{\n" + lines + "\n}\n")
