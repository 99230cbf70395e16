"""The toy family: the standard block under a name of its own, for seeded checkpoints of a few kilobytes."""

from __future__ import annotations

from mlxcel.plugins.families.decoder import DecoderFamily


class Tiny(DecoderFamily):
    """What `mlxcel doctor` and first steps run."""

    name = "tiny"
