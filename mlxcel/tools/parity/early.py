"""What is refused before a weight is read (docs/spec/clients.md 5.5, exit code 2), and the prompt that comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from mlxcel.choose_backend import choose_backend, probed
from mlxcel.core.backend import BackendSpec
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import UsageError
from mlxcel.load import choose_tokenizer
from mlxcel.text.chat_template import select_template
from mlxcel.text.prompt import check_ids, encode_chat, encode_raw
from mlxcel.tools.model_choice import ChosenModel
from mlxcel.tools.parity.options import GROUPS, ParityOptions
from mlxcel.tools.parity.scheduled import shared_length
from mlxcel.tools.random_tokenizer import RandomTokenizer

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.checkpoint import Checkpoint
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager

REFERENCE: Final = "reference-numpy"


@attrs.frozen
class AskedPrompt:
    """One of `messages`, `text` and `ids`; none of them is the built-in prompt of `length` tokens."""

    length: int
    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    ids: tuple[int, ...] | None = None

    @property
    def built_in(self) -> bool:
        return self.messages is None and self.text is None and self.ids is None


@attrs.frozen(eq=False)
class Prepared:
    """The prompt's ids int32 [P], and the tokenizer for what is printed."""

    prompt: np.ndarray
    tokenizer: Tokenizer


def require_deterministic(config: EngineConfig) -> None:
    """UsageError where nothing promises equal bits: a comparison would say nothing."""
    if not config.deterministic:
        raise UsageError(
            "engine-parity compares bits, and nothing asks for them to be the same",
            hint="set MLXCEL_SDPA_DETERMINISTIC=1, or give --deterministic",
        )


@attrs.frozen
class Backends:
    """The one that is compared with itself, with the level in force, and the other one with its device: None where
    there is none, or it cannot run here."""

    own: str
    level: str
    other: tuple[str, str] | None

    @classmethod
    def here(cls, config: EngineConfig, manager: PluginManager, asked: str | None) -> Backends:
        """`asked` is the other one, None: the reference, or the best one that may be taken unasked. UsageError for a
        name that is not known, and for twice the same; DeviceError as `choose_backend` raises it."""
        chosen = choose_backend(config, manager)
        try:
            own, level = chosen.name, chosen.backend.caps.level
        finally:
            chosen.backend.close()
        registry = manager.backends()
        if asked == own:
            raise UsageError(f"--other-backend {asked} is the backend itself", hint="name another one, or leave it out")
        if asked is not None:
            return cls(own, level, _device(registry.choose(asked), config, named=True))
        ranked = sorted(registry.values(), key=lambda spec: (spec.name != REFERENCE, -spec.priority))
        found = [_device(spec, config, named=False) for spec in ranked if spec.name != own]
        return cls(own, level, next((each for each in found if each is not None), None))


def _device(spec: BackendSpec, config: EngineConfig, *, named: bool) -> tuple[str, str] | None:
    """A backend's name and the device that it would run on: the configuration's, or the CPU."""
    for device in dict.fromkeys((config.device, "cpu")):
        probe = probed(spec, device)
        if probe.available and (named or not probe.by_name_only):
            return spec.name, device
    return None


def prepare(
    model: ChosenModel,
    config: EngineConfig,
    manager: PluginManager,
    progress: Progress,
    say: Callable[[str], None],
    options: ParityOptions,
    asked: AskedPrompt,
    groups: Iterable[str],
    level: str,
) -> Prepared:
    """The prompt, once everything is known to fit. Of the checkpoint headers and tokenizer are read."""
    with model.opened(config, manager, progress, say) as checkpoint:
        tokenizer = choose_tokenizer(checkpoint, manager) if model.vocab is None else RandomTokenizer(model.vocab)
        family = manager.families().load(manager.family_for(checkpoint.naming, checkpoint.architecture).name)()
        facts = family.parse_config(checkpoint)
        context, least = config.max_model_len or facts.context, max(1, config.prompt_cache_min_prefix)
        # Before a prompt is made that no context holds.
        if asked.built_in:
            check_length(asked.length, options, groups, level, least, context)
        prompt = _prompt_ids(model, config, checkpoint, tokenizer, asked, facts.vocab_size)
        check_length(len(prompt), options, groups, level, least, context)
    return Prepared(prompt, tokenizer)


def _prompt_ids(
    model: ChosenModel,
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    asked: AskedPrompt,
    vocab: int,
) -> np.ndarray:
    if asked.ids is not None:
        found = check_ids(asked.ids, vocab, field="--token-ids")
    elif asked.text is not None:
        found = encode_raw(tokenizer, asked.text).ids
    elif asked.messages is not None:
        template = select_template(
            checkpoint,
            flag_text=config.chat_template,
            flag_file=config.chat_template_file,
            flag_kwargs=config.chat_template_kwargs,
        )
        found = encode_chat(tokenizer, template, asked.messages, now=time.time()).ids
    else:
        return model.prompt(tokenizer, asked.length)
    return np.array(found, np.int32)


def check_length(
    length: int, options: ParityOptions, groups: Iterable[str], level: str, least: int, context: int
) -> None:
    """UsageError that names the groups which a prompt of `length` tokens does allow, where a hit takes `least` tokens
    of the prompt cache, and where its streams do not fit into `context` positions."""
    wanted = set(groups)
    if length < 1:
        raise UsageError("the prompt is empty: it comes to no token", hint="give a text, ids, or --prompt-tokens")
    if length + options.max_tokens > context:
        raise UsageError(
            f"a prompt of {length} tokens and {options.max_tokens} behind it come to {length + options.max_tokens}, "
            f"the context holds {context}",
            hint="ask for fewer with --prompt-tokens or -n, or for a larger --ctx-size",
        )
    first = options.chunks[0]
    reasons = {}
    if "chunk" in wanted and length <= min(options.chunks):
        reasons["chunk"] = f"{min(options.chunks)} tokens, the smaller chunk, are one piece in both arms"
    if "cache" in wanted:
        shared, granule = shared_length(length), first if level == "R1" else 1
        if length < 2 or shared // granule * granule < least:
            reasons["cache"] = (
                f"of the {shared} tokens that are shared a hit adopts multiples of {granule}, {least} at least"
            )
    if reasons:
        allowed = [group for group in GROUPS if group in wanted and group not in reasons]
        raise UsageError(
            f"the prompt of {length} tokens is too short for the pairs of {' and '.join(reasons)}: "
            f"{'; '.join(reasons.values())}",
            hint=f"take a longer one, or --pairs {','.join(allowed)}" if allowed else "take a longer one",
        )
