"""Which lists of stages a request may give (spec S1, S2)."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from mlxcel.core.params import STAGE_NAMES, SamplingParams
from mlxcel.core.stage_order import SEQUENCE_LETTERS, in_order
from mlxcel.errors import RequestError

PENALTIES = ("penalties", "dry")
FILTERS = ("top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc")


def allowed_lists() -> set[tuple[str, ...]]:
    """All of them, written out: a choice of penalties, of filters, of the end, and where the temperature stands."""

    def choices(names: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [chosen for count in range(len(names) + 1) for chosen in combinations(names, count)]

    found = set()
    for first in choices(PENALTIES):
        for filters in choices(FILTERS):
            for last in choices(("adaptive_p",)):
                found.add((*first, *filters, *last))
                found.add((*first, *filters, "temperature", *last))
                found.add((*first, "temperature", *filters, *last))
    return found


def test_every_list_that_the_rule_allows_is_taken() -> None:
    allowed = allowed_lists()
    assert len(allowed) == 4 * 2 * (3 * 64 - 1)
    for names in sorted(allowed):
        assert SamplingParams(samplers=names).samplers == names


def test_no_other_list_of_up_to_four_stages_is_taken() -> None:
    allowed = allowed_lists()
    for count in range(5):
        for names in permutations(STAGE_NAMES, count):
            assert in_order(names) == (names in allowed), names


@pytest.mark.parametrize(
    "names",
    [
        ["dry", "penalties"],
        ["top_k", "top_k"],
        ["top_k", "temperature", "top_p"],
        ["temperature", "penalties"],
        ["penalties", "temperature", "dry"],
        ["adaptive_p", "temperature"],
        ["temperature", "adaptive_p", "top_k"],
        ["temperature", "top_k", "temperature"],
        ["typical_p"],
        ["", "top_k"],
        [*STAGE_NAMES, "top_k"],
    ],
)
def test_any_other_order_is_refused_with_the_one_that_is_taken(names: list[str]) -> None:
    with pytest.raises(RequestError, match="penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc") as caught:
        SamplingParams(samplers=names)
    assert caught.value.field == "samplers"


@pytest.mark.parametrize("place", range(len(STAGE_NAMES) - 1))
def test_every_transposition_of_the_whole_list_is_refused(place: int) -> None:
    names = list(STAGE_NAMES)
    names[place], names[place + 1] = names[place + 1], names[place]
    with pytest.raises(RequestError, match="samplers"):
        SamplingParams(samplers=names)


def test_each_stage_has_a_letter() -> None:
    assert "".join(SEQUENCE_LETTERS) == "edskypmxta"
    assert tuple(SEQUENCE_LETTERS.values()) == STAGE_NAMES
