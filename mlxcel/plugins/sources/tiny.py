"""The toy model `tiny`: random weights of 431 kB, written on this machine, for first steps without a network."""

from __future__ import annotations

from mlxcel.core.source import ModelFile, ModelSource

SOURCE = ModelSource(
    name="tiny",
    summary="a toy of random weights, written without a network",
    bytes=0,
    license="Apache-2.0",
    files=(
        ModelFile("config.json", "4ad6d59c2fd4eeaced1474546dbd1640bb94e8f44889c5d2439e5dd5759685c7"),
        ModelFile("generation_config.json", "37d4048cd085a4e2c09407195e951a83deb92fefdd379ad05c5b09e44a3030d6"),
        ModelFile("model.safetensors", "4c78e80fd4e4bfa840ee3c568cb00b9b5de35888c256be3aa9fb85068fa46b73"),
        ModelFile("tokenizer.json", "111848629e845e705ad9b41d6132b43ca9f78f198c9698250dbc68d187725942"),
        ModelFile("tokenizer_config.json", "4c083859a6d528bb736c00bf89c678fc803f674490c6570fbe0fa7fd8294d12a"),
    ),
    fetch="mlxcel.plugins.sources.tiny_writer:fetch",
)
