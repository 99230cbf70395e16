"""The text model of a checkpoint: what of config.json describes it, and under which names its tensors lie.

A multimodal checkpoint wraps its text model: the config in `text_config`, the tensors behind a prefix that depends on
the release which saved them (`language_model.model.norm.weight`, `model.language_model.norm.weight`). A base model
saved without its head has no prefix at all (`norm.weight`). Everything behind the reader sees `model.norm.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import attrs

from mlxcel.errors import CheckpointError, shown

TEXT_KEYS: Final = ("text_config", "llm_config", "language_config")
MODALITIES: Final = ("vision_config", "audio_config", "thinker_config", "talker_config")
OTHER_HEADS: Final = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    *("ForRewardModel", "ForProcessRewardModel", "ForMaskedLM"),
)
"""How architectures end whose head gives no logits of the next token."""
EMBED: Final = "embed_tokens.weight"
ROOT: Final = "model."
HEAD: Final = "lm_head."
_LAYER: Final = re.compile(r"((?:.*?\.)?)layers\.(0|[1-9]\d{0,5})\.(.+)", re.DOTALL)
_BUFFERS: Final = (".rotary_emb.inv_freq",)  # written by old releases, recomputed by everyone


# --- config ----------------------------------------------------------------------------------------------------------


def text_model_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config of the text model: the inner one, with what is said only outside of it (`tie_word_embeddings` ...).

    An inner null stays one where nothing is said outside: left out, a key means what the family takes for granted, and
    `"sliding_window": null` is no window.

    `eos_token_id` is the outer one where both say it, and the inner config stays under `text_config`: both name ends.
    Without an inner config the config itself. `where` names the file. Raises CheckpointError for an inner config that
    is no object, a wrapper that has none, and an encoder-decoder.
    """
    key = next((key for key in TEXT_KEYS if config.get(key) is not None), None)
    if key is None:
        others = [name for name in MODALITIES if isinstance(config.get(name), Mapping)]
        if others and "num_hidden_layers" not in config:
            raise CheckpointError(
                f"{where}: {shown(config.get('model_type'))} is made of {', '.join(others)} and has no text_config: "
                "there is no text model in it that can be run",
                hint="take the checkpoint of the text model alone",
            )
        merged = dict(config)
    else:
        inner = config[key]
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{where}: {key} is {shown(inner)}, an object is needed")
        said = {name: value for name, value in inner.items() if value is not None or config.get(name) is None}
        merged = {**config, **said, "text_config": inner}
        if inner.get("model_type") is None:
            raise CheckpointError(
                f"{where}: {key} has no model_type, so that the text model of {shown(config.get('model_type'))} is of "
                "no known family",
                hint="take the config.json that belongs to the weights, or name the family in it",
            )
        if config.get("eos_token_id") is not None:
            merged["eos_token_id"] = config["eos_token_id"]
    if config.get("is_encoder_decoder") is True or merged.get("is_encoder_decoder") is True:
        raise CheckpointError(
            f"{where}: {shown(merged.get('model_type'))} is an encoder-decoder; only models that are a decoder alone "
            "are run",
            hint="take a decoder-only model",
        )
    refuse_other_heads(config, where)
    return merged


def refuse_other_heads(config: Mapping[str, Any], where: str) -> None:
    """CheckpointError for a model that was trained to classify: its body would run, with a head it was not made for."""
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name.endswith(OTHER_HEADS):
            raise CheckpointError(
                f"{where}: the architecture is {shown(name)}, a model that scores or labels texts and writes none",
                hint="take a model for text generation (its architecture ends in ForCausalLM)",
            )


# --- names -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class TextTower:
    """Where the tensors of a text model lie. `root` is the prefix of their names in the file, None when no complete
    text model was found: then every name is seen as it is."""

    root: str | None

    @property
    def is_moved(self) -> bool:
        """Whether tensors are seen under other names than their own."""
        return self.root not in (None, ROOT)

    def seen(self, name: str) -> str:
        """The name of a tensor of the file as everything behind the reader sees it."""
        if self.root is None or not self.is_moved:
            return name
        place, found, rest = name.partition(HEAD)
        if found and (not place or place.endswith(".")) and self.root.startswith(place):
            return HEAD + rest
        return ROOT + name[len(self.root) :] if name.startswith(self.root) else name

    def holds(self, name: str) -> bool:
        """Whether a tensor of the file may be one of the text model's: any, where none was found."""
        return self.root is None or name.startswith(self.root) or self.seen(name).startswith(HEAD)

    def seen_names(self, names: Iterable[str], where: str) -> dict[str, str]:
        """Seen name to the file's own. CheckpointError for two tensors that would be seen under one name."""
        own: dict[str, str] = {}
        for name in names:
            seen = self.seen(name)
            if seen in own:
                raise CheckpointError(
                    f"{where}: the tensors {own[seen]!r} and {name!r} are two spellings of {seen!r}",
                    hint="remove the one that does not belong to the text model",
                )
            own[seen] = name
        return own

    def needed(self, names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
        """Own name to seen name, of those that a text model needs as far as names and config tell.

        Not needed are other towers, layers beyond `num_hidden_layers` (draft heads), buffers, and the head of a model
        with tied embeddings."""
        layers, tied = layer_count(config), config.get("tie_word_embeddings") is True
        found: dict[str, str] = {}
        for name in names:
            seen = self.seen(name)
            match = _LAYER.fullmatch(seen) if layers is not None else None
            spare = (
                name.endswith(_BUFFERS)
                or not self.holds(name)
                or (tied and seen.startswith(HEAD))
                or (match is not None and match[1] == ROOT and int(match[2]) >= (layers or 0))
            )
            if not spare:
                found[name] = seen
        return found


def find_tower(names: Collection[str], config: Mapping[str, Any], where: str) -> TextTower:
    """The text model among tensors: an embedding, and layers 0 to `num_hidden_layers` beside it.

    In a wrapper the prefix may be any, else it is empty or ends in `model.`: a family may call its tensors otherwise.
    Raises CheckpointError for two complete text models.
    """
    wrapped = config.get("text_config") is not None
    layers = layer_count(config)
    roots = [name.removesuffix(EMBED) for name in names if name.endswith(EMBED)]
    roots = [root for root in roots if root.endswith(ROOT) or not root or (wrapped and root.endswith("."))]
    numbers: dict[str, set[int]] = {root: set() for root in roots}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is not None and match[1] in numbers:
            numbers[match[1]].add(int(match[2]))
    complete = [root for root, found in numbers.items() if _has_layers(found, layers)]
    if len(complete) > 1:
        raise CheckpointError(
            f"{where}: there are {len(complete)} text models, under {complete[0]!r} and {complete[1]!r}",
            hint="remove the files that do not belong to the checkpoint",
        )
    return TextTower(complete[0] if complete else None)


def is_whole(seen: Collection[str], config: Mapping[str, Any]) -> bool:
    """Whether nothing can be missing as far as names tell: all layers hold tensors of the same names, and there are an
    embedding, a final norm, and a head where embeddings are not tied. False where the names do not tell."""
    kinds: dict[int, set[str]] = {}
    for name in seen:
        match = _LAYER.fullmatch(name)
        if match is not None and match[1] == ROOT:
            kinds.setdefault(int(match[2]), set()).add(match[3])
    layers = layer_count(config)
    return (
        _has_layers(set(kinds), layers)
        and len({frozenset(kinds[layer]) for layer in kinds if layers is None or layer < layers}) == 1
        and f"{ROOT}{EMBED}" in seen
        and any(re.fullmatch(r"model\.\w*norm\.weight", name) for name in seen)
        and (config.get("tie_word_embeddings") is True or f"{HEAD}weight" in seen)
    )


def layer_count(config: Mapping[str, Any]) -> int | None:
    """`num_hidden_layers` where it is one."""
    layers = config.get("num_hidden_layers")
    return layers if type(layers) is int and layers > 0 else None


def _has_layers(numbers: set[int], layers: int | None) -> bool:
    """All of 0 to layers - 1; without a count, all up to the highest."""
    count = len(numbers) if layers is None else layers
    return count > 0 and sum(number < count for number in numbers) == count
