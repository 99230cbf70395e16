"""The tokenizer of a GGUF file, by the name of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlxcel.errors import CheckpointError, shown
from mlxcel.plugins.tokenizers import gguf_bpe, gguf_sentencepiece
from mlxcel.plugins.tokenizers.gguf_metadata import KEY

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint
    from mlxcel.core.tokenizer import Tokenizer

MODELS: Final[Mapping[str, Callable[[Mapping[str, Any], Path], Tokenizer]]] = {
    "gpt2": gguf_bpe.from_metadata,
    "llama": gguf_sentencepiece.from_metadata,
    "t5": gguf_sentencepiece.from_metadata,
}


def load(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint whose assets have "gguf".

    Raises CheckpointError when the metadata are damaged, or name a model or a pre-tokenizer that is not known.
    """
    metadata, path = checkpoint.assets["gguf"], checkpoint.path
    model = metadata.get(f"{KEY}model")
    if model is None:
        raise CheckpointError(f"{path} holds no tokenizer ({KEY}model is missing)", hint="convert the model again")
    if not isinstance(model, str) or model not in MODELS:
        raise CheckpointError(
            f"{path}: tokenizer model {shown(model)} is not known, known are 'gpt2' (byte-level BPE), "
            "'llama' (SentencePiece BPE) and 't5' (SentencePiece Unigram)",
            hint="take the checkpoint as a folder with tokenizer.json",
        )
    return MODELS[model](metadata, path)
