"""The ways of running a request that are compared (docs/spec/clients.md 5.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.tools.parity.options import ParityOptions

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig


@attrs.frozen
class Arm:
    """`direct` is the client of `generate`, any other goes through a scheduler. `settings` are the options in which its
    engine differs from the configuration. `hit`: a request that shares a prefix came before; `crowd`: so many others
    come beside. `store`: it was chosen for where its KV lives; `other`: it runs on the second backend."""

    letter: str
    name: str
    settings: Mapping[str, Any]
    direct: bool = False
    hit: bool = False
    crowd: int = 0
    store: bool = False
    other: bool = False

    def config(self, config: EngineConfig) -> EngineConfig:
        """The configuration of its engine. Prompts are kept where that is what the arm is about, and in no file. No
        program is made ready that the arm does not need."""
        always = {"enable_prefix_caching": False, "prompt_cache_file": None, "no_warmup": True}
        return attrs.evolve(config, **{**always, **self.settings})


def arms(options: ParityOptions, other: tuple[str, str]) -> dict[str, Arm]:
    """All of them by letter. `other` is the other backend and its device."""
    first, second = options.chunks
    backend, device = other
    alone = {"max_num_seqs": 1}
    cached = {"prefill_chunk": first, "enable_prefix_caching": True}
    made = (
        Arm("a", "a:direct", {}, direct=True),
        Arm("b", "b:dense", {**alone, "kv_storage": "dense"}, store=True),
        Arm("c", "c:paged", {**alone, "kv_storage": "paged"}, store=True),
        Arm("d", "d:miss", cached),
        Arm("e", "e:hit", cached, hit=True),
        Arm("f", f"f:chunk-{first}", {"prefill_chunk": first}),
        Arm("g", f"g:chunk-{second}", {"prefill_chunk": second}),
        Arm("h", f"h:batch-{options.batch}", {"max_num_seqs": options.batch}, crowd=options.batch - 1),
        Arm("x", f"x:{backend}", {"backend": backend, "device": device}, direct=True, other=True),
    )
    return {arm.letter: arm for arm in made}
