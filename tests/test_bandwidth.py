"""benchmarks/bandwidth.py and decode.py: which of the rates that they see they call the memory's, and a step's."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bandwidth(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bandwidth")


class Memory:
    """A clock, and forms whose calls take what is stated, the last figure from then on."""

    def __init__(self):
        self.now = 0.0
        self.calls = {}

    def form(self, bandwidth, kind, words, seconds, size=10**9):
        def call():
            made = self.calls[words] = self.calls.get(words, 0) + 1
            self.now += seconds[min(made, len(seconds)) - 1]

        return bandwidth.Form(kind, words, size, call)

    def rounds(self, bandwidth, forms, count):
        found = bandwidth.Bandwidth(forms, wait=lambda made: made, clock=lambda: self.now)
        assert found.gb_per_s == {}
        for _ in range(count):
            found.round()
        return found


def test_calls_that_compile_and_those_that_warm_are_not_timed(bandwidth):
    memory = Memory()
    first = memory.form(bandwidth, "read", "a", [9.0, *[2.0] * bandwidth.WARMING, 0.25])
    second = memory.form(bandwidth, "read", "b", [9.0, 0.5])
    found = memory.rounds(bandwidth, [first, second], 3)
    assert (first.rates, second.rates) == ([4.0] * 3, [2.0] * 3)
    assert memory.calls == {"a": 1 + 3 * (bandwidth.WARMING + 1), "b": 1 + 3}
    assert found.gb_per_s == {"read": 4.0}


def test_each_kind_is_the_best_of_its_forms_medians(bandwidth):
    """A form that was fast once is not what counts, nor is one that was slow once."""
    rates = {"lucky": [2.0, 10.0, 2.0], "steady": [1.0, 4.0, 4.0], "copied": [1.0]}
    kinds = {"lucky": "read", "steady": "read", "copied": "copy"}
    forms = [bandwidth.Form(kind, words, 1, None, rates[words]) for words, kind in kinds.items()]
    found = bandwidth.Bandwidth(forms, wait=None)
    assert found.gb_per_s == {"read": 4.0, "copy": 1.0}
    assert found.rows[1] == {
        "what": "copy", "form": "copied", "gb_per_s": 1.0, "gb_per_s_range": [1.0, 1.0], "rounds": 1,
        "counts": "best of the medians",
    }  # fmt: skip
    assert [row["form"] for row in found.rows] == ["steady", "copied", "lucky", "steady", "copied"]


def test_forms_on_a_device_go_over_all_words_as_often_as_they_say(bandwidth):
    import jax
    import numpy as np

    def words(size):
        return np.asarray(jax.random.bits(jax.random.key(size), (size // 4,), "uint32"))

    whole, half = 1 << 20, 1 << 19
    forms = bandwidth.on_this_device((whole, half), 1 << 22)._forms
    assert [form.size for form in forms] == [1 << 22] * 6
    to_one, by_rows, permuted, copied, to_one_half, by_rows_half = (np.asarray(form.call()) for form in forms)
    for found, found_rows, size, turns in ((to_one, by_rows, whole, 4), (to_one_half, by_rows_half, half, 8)):
        largest, rows = np.uint32(0), words(size).reshape(-1, bandwidth.LANES)
        of_rows = np.zeros(len(rows), np.uint32)
        for _ in range(turns):
            largest, of_rows = (rows ^ largest).max(), (rows ^ of_rows[:, None]).max(axis=1)
        assert found == largest
        assert (found_rows == of_rows).all()
    first = words(whole)[: whole // 8]
    assert (copied == first).all()
    wanted = first
    for _ in range(4):
        wanted = wanted * np.uint32(1664525) + np.uint32(1013904223)
    assert (permuted == wanted).all()


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("first", [1, 3, 4])
def test_a_mean_step_is_that_of_a_clock_whichever_tokens_come_together(monkeypatch, together, first):
    """A token takes 5 s of the clock; a client hears of those of one call at once, and of `first` before all others."""
    ends = [first + count * together for count in range(9)]
    moments = [5.0 * next(end for end in ends if end > place) + place / 1e6 for place in range(ends[-1])]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert importlib.import_module("decode").mean_step(moments) == pytest.approx(5.0, rel=1e-5)
