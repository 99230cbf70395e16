"""The sections of benchmarks/gpu_check.py over engines of reference-numpy: without a mistake they find nothing, and
each planted mistake is seen by the sections that are there for it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
from planted_faults import StaleEntry

from mlxcel_reference_numpy.backend import NumpyBackend

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench(monkeypatch):
    """The modules of benchmarks/, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


PROMPTS = ((1, 0), (0, 7), (40, 23), (64, 1), (130, 9))
"""In the place of longer ones: a page and two, with a beginning that all share."""


class StaleTables(NumpyBackend):
    """Where as many rows decode as in the step before, their page tables are taken for the same."""

    before = None

    def submit(self, plan):
        before, self.before = self.before, plan.page_tables
        if not plan.pieces.any() and before is not None and before.shape == plan.page_tables.shape:
            plan = attrs.evolve(plan, page_tables=before)
        return super().submit(plan)


class SwappedTokens(NumpyBackend):
    """In a piece of more than 20 tokens the third and the fourth have changed places."""

    def submit(self, plan):
        ids = plan.token_ids.copy()
        for row in np.flatnonzero(plan.pieces):
            start, end = plan.query_start[row : row + 2]
            if end - start > 20:
                ids[start + 2 : start + 4] = ids[start + 2 : start + 4][::-1]
        return super().submit(attrs.evolve(plan, token_ids=ids))


class LateNoise(NumpyBackend):
    """In company, the noise of a draw is that of the next position."""

    def submit(self, plan):
        sampling = plan.sampling
        if plan.num_rows > 1 and "position" in sampling.params:
            params = {**sampling.params, "position": sampling.params["position"] + 1}
            plan = attrs.evolve(plan, sampling=attrs.evolve(sampling, params=params))
        return super().submit(plan)


class InRuns(NumpyBackend):
    """Steps of up to eight rows may be submitted four at a time, and bring tokens alone."""

    @property
    def caps(self):
        return attrs.evolve(super().caps, decode_runs=((8, 4),))

    def submit_run(self, plans):
        return [attrs.evolve(self.submit(plan), top_logprobs=None) for plan in plans]


class RunsOfOnePosition(InRuns):
    """The third step of a run stands where the second stood."""

    def submit_run(self, plans):
        plans[2] = attrs.evolve(plans[2], positions=plans[1].positions)
        return super().submit_run(plans)


class RunsWithEnds(InRuns):
    """A run draws the ends that its rows ignore."""

    def submit_run(self, plans):
        ignored = [plan.sampling.params.get("ends") for plan in plans]
        forgotten = [
            plan if ends is None else attrs.evolve(
                plan,
                sampling=attrs.evolve(plan.sampling, params={**plan.sampling.params, "ends": np.full_like(ends, -1)}),
            )
            for plan, ends in zip(plans, ignored, strict=True)
        ]  # fmt: skip
        return super().submit_run(forgotten)


class NumpyEngines:
    """In the place of CheckEngines."""

    sms = 0

    def __init__(self, open_engine, witness, backend):
        self._open, self._witness, self._backend, self._made = open_engine, witness, backend, {}

    def __call__(self, setup, rows, tokens, *, sampler=None, dtype=None, runs=False):
        key = setup, sampler, dtype
        if key not in self._made:
            backend = self._witness.Witness(self._backend())
            self._made[key] = self._open(setup, backend, sampler=sampler or self._witness.WitnessSampler)
        return self._made[key]


@pytest.fixture
def found(bench, monkeypatch):
    """The rows of a section over a backend."""
    monkeypatch.setattr(bench("check_crowds"), "PROMPTS", PROMPTS)

    def run(module, section, backend=NumpyBackend, **changes):
        engines = bench("check_engines")
        made = NumpyEngines(bench("random_engines").open_engine, bench("witness"), backend)
        sizes = attrs.evolve(engines.SMALL, **{"companies": 30, "many_steps": 100, **changes.pop("sizes", {})})
        return list(getattr(bench(module), section)(engines.Checks(sizes, made, **changes)))

    return run


def wrong(rows):
    return [row["way"] for row in rows if row["wrong"]]


SECTIONS = {
    "same": "check_bits", "r2": "check_bits", "widths": "check_bits", "schedules": "check_crowds",
    "steps": "check_crowds", "context": "check_long",
}  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_nothing_is_wrong_without_a_mistake(found, section):
    rows = found(SECTIONS[section], section)
    assert len(rows) > 1
    assert not wrong(rows)


@pytest.mark.parametrize(
    ("section", "mistake", "seen"),
    [
        ("r2", StaleEntry, {"a prompt cache hit"}),
        ("r2", SwappedTokens, {"chunk of 256"}),
        ("r2", RunsWithEnds, {"1 greedy, 4 steps at a time", "8 greedy, 4 steps at a time"}),
        ("widths", SwappedTokens, {"1 to 30 tokens of a piece"}),
        ("schedules", StaleTables, set()),
        ("schedules", StaleEntry, set()),
        ("schedules", LateNoise, set()),
        ("steps", StaleTables, {"8 pages a row", "3 pages a row"}),
        ("context", SwappedTokens, {"chunk of 256, 128", "chunk of 85, 128"}),
    ],
)
def test_a_planted_mistake_is_seen(found, section, mistake, seen):
    ways = wrong(found(SECTIONS[section], section, mistake))
    assert ways
    assert set(ways) >= seen


def test_nothing_that_is_compared_by_logits_goes_by_runs(found):
    assert not wrong(found("check_bits", "widths", RunsOfOnePosition))


@pytest.mark.parametrize(
    ("section", "way"),
    [
        ("r2", "one of 8, 4 steps at a time"),
        ("r2", "8 greedy, 4 steps at a time"),
        ("steps", "8 pages a row"),
    ],
)
def test_runs_of_steps_are_compared_by_tokens_that_follow_from_bits(found, section, way):
    rows = [row for row in found(SECTIONS[section], section, InRuns) if row["way"] == way]
    assert rows
    assert not wrong(rows)
    assert all(row.get("runs", 1) > 0 for row in rows)
    assert way in wrong(found(SECTIONS[section], section, RunsOfOnePosition))


def test_a_schedule_that_is_wrong_is_wrong_again_by_its_number(found):
    rows = found("check_crowds", "schedules", StaleTables)
    first = next(row for row in rows if row["wrong"])
    number = int(first["way"].removeprefix("schedule "))
    (again,) = found("check_crowds", "schedules", StaleTables, only=(number,))
    assert again["differs"] == first["differs"]
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    (other,) = found("check_crowds", "schedules", only=(number,), seed=1)
    assert not other["wrong"]


def test_schedules_have_company_hits_and_preemptions(found):
    rows = found("check_crowds", "schedules")
    for what in ("sampled", "hits", "preempted"):
        assert sum(row[what] for row in rows) > 1, what
    assert {row["storage"] for row in rows} == {"paged", "dense"}


def test_steps_count_every_batch_that_is_another(found):
    rows = found("check_crowds", "steps", sizes={"many_steps": 60})
    assert [row["steps"] for row in rows] == [pytest.approx(30, abs=1)] * 2  # a step ahead may be one too many
    assert all(row["companies"] > 15 for row in rows)


def test_a_step_that_hangs_ends_the_process(tmp_path):
    """With the traceback of the place, and at once: what a device never gives back can be ended by nothing else."""
    text = """
        import time, sys, attrs
        import check_crowds, check_engines, witness, test_gpu_check
        from random_engines import open_engine

        class Hangs(test_gpu_check.NumpyBackend):
            reads = 0
            def read(self, handle):
                self.reads += 1
                if self.reads > 100:
                    time.sleep(600)
                return super().read(handle)

        check_crowds.HANG_SECONDS = float(sys.argv[1])
        sizes = attrs.evolve(check_engines.SMALL, many_steps=20_000, tables=((128, 16),))
        made = test_gpu_check.NumpyEngines(open_engine, witness, Hangs)
        for row in check_crowds.steps(check_engines.Checks(sizes, made)):
            print(row)
    """
    script = tmp_path / "hangs.py"
    script.write_text("\n".join(line[8:] for line in text.splitlines()))
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "typings", ROOT / "benchmarks", ROOT / "tests"]))
    for seconds in ("2", "8", "32"):  # on a busy machine steps that do not hang may take as long as the first
        done = subprocess.run(
            [sys.executable, str(script), seconds],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert "Timeout" in done.stderr
        if "in read" in done.stderr:
            break
    assert "in read" in done.stderr


def test_products_see_another_order_of_summation(bench, monkeypatch):
    """Planted: a launch of 64 tokens adds the two halves of the depth, where others go through it in one."""
    products, engines = bench("check_products"), bench("check_engines")
    sizes = attrs.evolve(engines.SMALL, companies=12)
    checks = engines.Checks(sizes, engines.CheckEngines(None, "cpu", "auto"))
    launch = products.launch

    def halved(name, weight, sms):
        product = launch(name, weight, sms)

        def run(tiles, x):
            if len(x) != 64:
                return product(tiles, x)
            half = weight.depth // 2
            return product(tiles, x.at[:, half:].set(0)) + product(tiles, x.at[:, :half].set(0))

        return run

    def one_weight(checks):
        return [(shape, name, weight) for shape, name, weight in weights(checks) if name == "o"]

    weights = products._weights
    monkeypatch.setattr(products, "_weights", one_weight)
    (row,) = products.products(checks)
    assert not row["wrong"]
    assert row["companies"] == 12 + 8 + 12
    assert row["compared"] == 12 + sum(range(1, 9)) + sum(range(1, 13))
    monkeypatch.setattr(products, "launch", halved)
    (row,) = products.products(checks)
    assert row["wrong"]
    assert row["differs"].startswith("12: T=1 of 64, T=2 of 64")


def test_a_launch_of_every_width_has_every_number_of_tokens(bench):
    """Batches of 1 to 300 and pieces of 1 to 300, each in the width that holds it, among noise."""
    products, engines = bench("check_products"), bench("check_engines")
    made = {each.tokens: each for each in products.companies(engines.Checks(engines.Sizes(), None), "qkv")}
    real = {tokens: each.real.sum(axis=1).tolist() for tokens, each in made.items()}
    assert sorted(real) == [8, 32, 64, 128, 256, 512]
    assert real[8] == [1] * 300 + list(range(1, 9))
    assert real[32] == list(range(9, 33))
    assert real[256] == list(range(129, 257))
    assert real[64] == list(range(1, 65))
    assert real[512] == list(range(65, 301))
    for each in made.values():
        for index, who in zip(each.index, each.real, strict=True):
            assert len(set(index[who])) == who.sum()
            assert (index[who] < 300).all()
            assert (index[~who] >= 300).all()


@pytest.mark.parametrize("place", [0, 5, 319])
@pytest.mark.parametrize("bit", [0, 15, 16, 31])
def test_the_digest_sees_one_bit(bench, place, bit):
    digest = bench("witness").digest
    logits = np.random.default_rng(0).standard_normal((2, 320)).astype(np.float32)
    other = logits.copy()
    other.view(np.uint32)[1, place] ^= np.uint32(1 << bit)
    mine, theirs = digest(np, logits), digest(np, other)
    assert (mine[0] == theirs[0]).all()
    assert (mine[1] != theirs[1]).any()
    assert ((mine >= 0) & (mine < 2**16) & (mine == np.floor(mine))).all()
