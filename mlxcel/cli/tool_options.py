"""Options that the measuring tools share."""

from __future__ import annotations

from typing import Final

import click

from mlxcel.cli.options import KindType, SectionOption
from mlxcel.option_values import NAME, whole

SECTION: Final = "Measuring"


def random_weights_options() -> list[click.Parameter]:
    """`random_weights` and `weights_seed`, for `chosen_model`."""
    return [
        SectionOption(
            ("--random-weights",), type=KindType(NAME), metavar="NAME", section=SECTION,
            help="No model but its shape, with random weights: llama-3.2-1b, llama-3.1-8b, qwen3-0.6b or qwen3-1.7b.",
        ),
        SectionOption(
            ("--weights-seed",), type=KindType(whole(0, 2**63 - 1, "an integer from 0 to 2**63 - 1")), default=0,
            metavar="N", section=SECTION, help="What the random weights follow from.  [0]",
        ),
    ]  # fmt: skip
