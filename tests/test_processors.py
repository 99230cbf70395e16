"""Logits processors: docs/spec/engine.md S45 and S48, in the chain and through the engine."""

import re
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from engine_rows import decode, run_to_end, scripted, turn
from engine_rows import opened as open_row
from logit_rows import LIBRARIES, opened, params, run
from plugin_doubles import HEADER, Installer, load
from sampling_rows import draw_states
from tiny_checkpoint import write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import LogitsProcessor
from mlxcel.core.source import NoProgress
from mlxcel.errors import NoTokenAllowed, NumericFault, PluginError, RequestError
from mlxcel.load import load_model
from mlxcel.plugins.sampling.bits import allowed_words
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.logit_stages import logit_stages
from mlxcel.plugins.sampling.processors import MOST_ELEMENTS
from mlxcel.testing.byte_tokenizer import ByteTokenizer

VOCAB = 7
A, B, C = b"abc"


class Processor:
    """A batched one whose `prepare` passes its arguments on."""

    history = 0

    def __init__(self, stage="processors", history=0):
        self.stage, self.history = stage, history

    def prepare(self, args, spec):
        return {name: np.asarray(value, np.float32) for name, value in args.items()}


class Affine(Processor):
    """z * times + plus: two of them in another order give another result."""

    def apply(self, xp, logits, params, history):
        return logits * params["times"][:, None] + params["plus"][:, None]


class Spoils(Processor):
    """Makes `value` of every logit of every row, its own or not."""

    def apply(self, xp, logits, params, history):
        return xp.full_like(logits, xp.float32(self.value))

    value = float("nan")


class Overflows(Spoils):
    value = float("inf")


class Ban(Processor):
    """Masks ids; lifts and moves all others, which must not count."""

    def prepare(self, args, spec):
        return {"ids": np.array(args["ids"], np.int32)}

    def apply(self, xp, logits, params, history):
        ids = xp.arange(logits.shape[1], dtype=xp.int32)
        banned = xp.any(params["ids"][:, :, None] == ids, axis=1)
        return xp.where(banned, -xp.float32(xp.inf), xp.float32(99))


class Echo(Processor):
    """Writes the row's newest ids into its first logits."""

    def __init__(self, length):
        super().__init__(history=length)

    def prepare(self, args, spec):
        return {}

    def apply(self, xp, logits, params, history):
        return xp.concatenate([xp.astype(history, xp.float32), logits[:, history.shape[1] :]], axis=1)


class Evens:
    """A host mask: even ids, or odd ones where the output has an odd number of tokens."""

    stage = "masks"

    def __init__(self, *, looks=False):
        self.looks = looks

    def prepare(self, args, spec):
        return args or {}

    def closed(self, prepared):
        return not self.looks

    def mask(self, prepared, row):
        number = len(row.output) if self.looks else row.generated
        return allowed_words(np.arange(prepared.get("vocab", VOCAB)) % 2 == number % 2)


def asked(*entries, **given):
    return params(logits_processors=[{"name": name, "args": args} for name, args in entries], **given)


def sampler_of(**processors):
    return ChainSampler(vocab=VOCAB, tokenizer=None, processors=processors)


def logits_behind(library, processors, z, rows, *, newest=None, **behind):
    """What the logit stages leave: [R, V]."""
    chain = logit_stages(VOCAB, None, processors)
    states = [opened(chain, row, **behind) for row in rows]
    in_flight = [newest] * len(rows)
    return run(LIBRARIES[library], chain, np.asarray(z, np.float32), states, newest=in_flight)


Z = np.arange(3 * VOCAB, dtype=np.float32).reshape(3, VOCAB) - 5


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("stage", ["bias", "processors"])
def test_a_processor_acts_on_its_own_rows_and_the_others_keep_their_bits(library, stage):
    """S3, S48: the middle row uses it; -0.0 and -inf beside it stay what they are."""
    z = Z.copy()
    z[0, :2] = -0.0, -np.inf
    processors = {"twice": Affine(stage)}
    rows = [params(), asked(("twice", {"times": 2, "plus": 0.5})), params(temperature=0)]
    found = logits_behind(library, processors, z, rows)
    assert found[0].tobytes() == z[0].tobytes()
    assert found[2].tobytes() == z[2].tobytes()
    assert found[1].tolist() == (z[1] * 2 + np.float32(0.5)).tolist()
    alone = logits_behind(library, processors, z[1:2], rows[1:2])
    assert alone[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_stages_stand_where_they_say(library):
    """Spec 4.1: bias before the repetition penalty, processors behind it, masks last."""
    rows = [
        asked(("early", {"times": 1, "plus": 10}), repetition_penalty=2),
        asked(("late", {"times": 1, "plus": 10}), repetition_penalty=2),
    ]
    processors = {"early": Affine("bias"), "late": Affine("processors")}
    found = logits_behind(library, processors, np.full((2, VOCAB), 4), rows)
    assert found[:, 0].tolist() == [7, 12]
    assert found[:, 1].tolist() == [14, 14]
    lifted = asked(("late", {"times": 0, "plus": 10}), logit_bias=[[3, False]])
    assert logits_behind(library, processors, Z[:1], [lifted]).tolist() == [[10, 10, 10, -np.inf, 10, 10, 10]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_processors_run_in_the_order_of_each_request(library):
    """Spec 4.1, stage 5: two rows of one step with two orders; one name may stand twice."""
    add, double = ("add", {"times": 1, "plus": 1}), ("double", {"times": 2, "plus": 0})
    rows = [asked(add, double), asked(double, add), asked(add, add)]
    processors = {"add": Affine(), "double": Affine()}
    found = logits_behind(library, processors, np.ones((3, VOCAB)), rows)
    assert found[:, 0].tolist() == [4, 3, 3]
    both = [asked(add, ("ban", {"ids": [0]}), double)]
    processors["ban"] = Ban("masks")
    assert logits_behind(library, processors, np.ones((1, VOCAB)), both).tolist() == [[-np.inf, *[4] * 6]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_mask_only_removes(library):
    """S48, S14: what a mask makes of other logits does not count, and it lifts nothing."""
    rows = [asked(("ban", {"ids": [1, 2]}), allowed_token_ids=[0, 2, 3]), asked(("ban", {"ids": list(range(20))}))]
    found = logits_behind(library, {"ban": Ban("masks")}, Z[:2], rows)
    assert found[0].tolist() == [-5, -np.inf, -np.inf, -2, *[-np.inf] * 3]
    assert np.isneginf(found[1]).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("newest", [None, 6])
def test_history_ends_with_the_newest_id(library, newest):
    """S48, C51: as many ids as declared, -1 where there are none; the id in flight is the device's own."""
    known = [] if newest is None else [newest]
    for length in (1, 3, 7):
        processors, row = {"echo": Echo(length)}, asked(("echo", {}))
        found = logits_behind(library, processors, Z[:1], [row], newest=newest, prompt=[1, 2], output=[3])
        ids = [1, 2, 3, *known][-length:]
        assert found[0, :length].tolist() == [*[-1] * (length - len(ids)), *ids]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", [Spoils, Overflows])
def test_nan_out_of_a_processor_fails_its_row_by_name(library, kind):
    """S45: the status names the processor, and rows that do not use it are unharmed."""
    sampler = sampler_of(fine=Affine(), bad=kind())
    rows = [params(temperature=0), asked(("fine", {"times": 1, "plus": 0}), ("bad", {})), params(seed=4)]
    states = [sampler.open(SequenceSpec("row", np.array([0], np.int32), row)) for row in rows]
    drawn = draw_states(LIBRARIES[library], Z, states, [1, 1, 1], sampler=sampler)
    tokens, status = np.asarray(drawn.tokens), np.asarray(drawn.status)
    assert (status & 0xFF).tolist() == [0, 1, 0]
    assert tokens.tolist() == [6, -1, tokens[2]]
    assert "from the logits processor 'bad'" in sampler.fault(states[1], int(status[1]))
    spoilt = Z.copy()
    spoilt[1, 3] = np.nan
    status = np.asarray(draw_states(LIBRARIES[library], spoilt, states, [1, 1, 1], sampler=sampler).status)
    assert sampler.fault(states[1], int(status[1])) == "NaN or +inf in its logits"


# --- refused at open -------------------------------------------------------------------------------------------------


class Transposed(Processor):
    def apply(self, xp, logits, params, history):
        return logits.T


class Lone(Processor):
    def apply(self, xp, logits, params, history):
        return logits[0]


class Doubles(Processor):
    def apply(self, xp, logits, params, history):
        return xp.astype(logits, np.float64)


class Raises(Processor):
    def apply(self, xp, logits, params, history):
        raise KeyError("boom")


class InPlace(Processor):
    def apply(self, xp, logits, params, history):
        logits[:, 0] = 0
        return logits


class Prepares(Affine):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def prepare(self, args, spec):
        return self.made(args)


UNFIT = {
    "transposed": (Transposed(), rf"made float32 \[{VOCAB}, 2\] of float32 \[2, {VOCAB}\]"),
    "one row": (Lone(), rf"made float32 \[{VOCAB}\] of"),
    "float64": (Doubles(), "made float64"),
    "raises": (Raises(), r"failed: KeyError\('boom'\)"),
    "in place": (InPlace(), "failed: ValueError.*read-only"),
    "no arrays": (Prepares(lambda args: 3), "prepares a int, not arrays by name"),
    "int64": (Prepares(lambda args: {"n": np.int64(3)}), r"prepares 'n' as int64 \[\]"),
    "text": (Prepares(lambda args: {"n": "x"}), "prepares 'n' as <U1"),
    "too large": (Prepares(lambda args: {"n": np.zeros(MOST_ELEMENTS + 1, bool)}), "at most 1048576 elements"),
    "refuses": (Prepares(lambda args: args["gone"]), r"refuses its arguments: KeyError\('gone'\)"),
}


@pytest.mark.parametrize("how", UNFIT)
def test_a_processor_that_is_unfit_refuses_its_row_by_name(how):
    """S48: found when the row is opened, so that no step of others meets it."""
    processor, words = UNFIT[how]
    sampler = sampler_of(odd=processor)
    sampler.open(SequenceSpec("row", np.array([0], np.int32), params()))
    with pytest.raises(RequestError, match=f"(?s)the logits processor 'odd'.*{words}") as caught:
        sampler.open(SequenceSpec("row", np.array([0], np.int32), asked(("odd", {}))))
    assert caught.value.field == "logits_processors"


def test_a_request_error_of_its_own_reaches_the_user_as_it_is():
    def refuses(args):
        raise RequestError("only on Sundays", field="logits_processors")

    with pytest.raises(RequestError, match=r"^only on Sundays$"):
        sampler_of(odd=Prepares(refuses)).open(SequenceSpec("row", np.array([0], np.int32), asked(("odd", {}))))


def test_a_row_that_gives_other_arrays_is_refused():
    """Arrays of all rows are stacked: a later row with other names or ranks would break everybody's step."""
    sampler = sampler_of(affine=Affine())
    spec = [SequenceSpec("row", np.array([0], np.int32), asked(("affine", args))) for args in (
        {"times": 1, "plus": 2}, {"times": 1, "plus": 2, "more": 3}, {"times": [1, 1], "plus": 2})]  # fmt: skip
    sampler.open(spec[0])
    for other in spec[1:]:
        with pytest.raises(RequestError, match=r"prepares (more|plus \(float32, 0 axes\), times \(float32, 1)"):
            sampler.open(other)
    sampler.open(spec[0])


def test_an_unknown_processor_is_refused():
    with pytest.raises(RequestError, match=r"logits_processors\[1\]: no logits processor is called 'loud'") as caught:
        sampler_of(a=Affine()).open(
            SequenceSpec("row", np.array([0], np.int32), asked(("a", {"times": 1, "plus": 0}), ("loud", {})))
        )
    assert "known: a" in str(caught.value.hint)


class NoForm:
    stage = "processors"

    def prepare(self, args, spec):
        return None


class BothForms(Evens):
    history = 0

    def apply(self, xp, logits, params, history):
        return logits


class MaskElsewhere(Evens):
    stage = "bias"


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (Affine("draw"), "has the stage 'draw', which is none of bias, processors, masks"),
        (Affine(history=-1), "has a `history` of -1"),
        (Affine(history=4097), "has a `history` of 4097"),
        (Affine(history=True), "has a `history` of True"),
        (NoForm(), "must have one of `apply` and `mask`"),
        (BothForms(), "must have one of `apply` and `mask`"),
        (MaskElsewhere(), "has `mask`: then its stage is 'masks'"),
    ],
)
def test_a_processor_of_no_kind_is_an_error_at_start(processor, words):
    with pytest.raises(PluginError, match="the logits processor 'odd' ") as caught:
        sampler_of(odd=processor)
    assert words in caught.value.message


# --- through the engine ----------------------------------------------------------------------------------------------


def test_a_host_mask_forbids_what_the_script_wants():
    """Even ids in even places, odd ones in odd places; both forms of looking agree, one of them with a step ahead."""
    script = [A, A, A, A, B, B]
    size = ByteTokenizer().size
    for looks in (False, True):
        it = scripted({"r": script}, processors={"evens": Evens(looks=looks)})
        entry = [{"name": "evens", "args": {"vocab": size}}]
        row, plan = open_row(it.engine, "r", max_tokens=6, logits_processors=entry)
        output, _, _ = run_to_end(it.engine, row, plan)
        assert [token % 2 for token in output] == [0, 1, 0, 1, 0, 1]
        assert [output[1], output[3], output[4]] == [A, A, B]


def test_a_host_mask_that_counts_allows_a_step_ahead():
    """C51: closed, so that the engine takes two steps before it reads the first; the same ids come out."""
    size = ByteTokenizer().size
    entry = [{"name": "evens", "args": {"vocab": size}}]
    it = scripted({"r": [A] * 6}, processors={"evens": Evens()})
    row, plan = open_row(it.engine, "r", max_tokens=6, logits_processors=entry)
    it.engine.prefill(row, plan)
    it.engine.reserve(decode(row))
    first = it.engine.submit(decode(row))
    it.engine.reserve(decode(row))
    second = it.engine.submit(decode(row))
    tokens = [it.engine.collect(first)[0].token, it.engine.collect(second)[0].token]
    assert [token % 2 for token in tokens] == [1, 0]


class Fails(Evens):
    def mask(self, prepared, row):
        if len(row.output) == 1:
            raise ZeroDivisionError("boom")
        return super().mask(prepared, row)


class WrongBits(Evens):
    def mask(self, prepared, row):
        return np.ones(prepared["vocab"], bool)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Fails(looks=True), "failed: ZeroDivisionError"),
        (WrongBits(looks=True), "uint32 [9] for 259 ids, not bool [259]"),
    ],
)
def test_a_host_mask_that_fails_fails_its_row_alone(mask, words):
    """S48: its neighbour in the same step gets its token."""
    it = scripted({"r": [A] * 6, "s": [B] * 6}, processors={"evens": mask})
    entry = [{"name": "evens", "args": {"vocab": 259}}]
    row, plan = open_row(it.engine, "r", logits_processors=entry)
    other, other_plan = open_row(it.engine, "s")
    it.engine.prefill(other, other_plan)
    error = it.engine.prefill(row, plan).error
    while error is None:
        lost, kept = turn(it.engine, *decode(row, other))
        assert kept.token == B
        error = lost.error
    assert isinstance(error, NoTokenAllowed)
    assert f"sequence {row}: the logits processor 'evens' " in error.message
    assert words in error.message


def test_nan_out_of_a_processor_is_a_numeric_fault_of_its_row():
    it = scripted({"r": [A] * 6, "s": [B] * 6}, processors={"bad": Spoils()})
    row, plan = open_row(it.engine, "r", logits_processors=[{"name": "bad"}])
    other, other_plan = open_row(it.engine, "s", max_tokens=6)
    error = it.engine.prefill(row, plan).error
    assert isinstance(error, NumericFault)
    assert "NaN or +inf from the logits processor 'bad'" in error.message
    assert run_to_end(it.engine, other, other_plan)[0] == (B,) * 6


PLUGIN = """
import re
from pathlib import Path
from textwrap import dedent

import numpy as np

@hookimpl
def mlxcel_logits_processors():
    return [Named("prefer", "raises one id", f"{__name__}:Prefer")]

class Prefer:
    stage = "processors"
    history = 1

    def __init__(self, *, vocab, tokenizer):
        self.vocab, self.tokenizer = vocab, tokenizer

    def prepare(self, args, spec):
        return {"id": np.int32(self.tokenizer.encode(args["text"], add_special=False)[0])}

    def apply(self, xp, logits, params, history):
        chosen = xp.arange(self.vocab, dtype=xp.int32) == params["id"][:, None]
        return xp.where(chosen & (history[:, -1:] != params["id"][:, None]), xp.float32(1e6), logits)
"""


def test_a_third_partys_processor_from_its_distribution_to_a_reply(third_party: Installer) -> None:
    """design 4: registered, chosen by name in a request, made, and heard: no id twice in a row."""
    third_party.install("mine", HEADER + PLUGIN)
    registry, tokenizer = load().logits_processors(), ByteTokenizer()
    made = {name: registry.maker(name, LogitsProcessor)(vocab=tokenizer.size, tokenizer=tokenizer) for name in registry}
    it = scripted({"r": [A] * 4, "s": [A] * 4}, processors=made)
    entry = [{"name": "prefer", "args": {"text": "c"}}]
    row, plan = open_row(it.engine, "r", max_tokens=4, logits_processors=entry)
    assert run_to_end(it.engine, row, plan)[1] == "acac"
    plain, plan = open_row(it.engine, "s", max_tokens=4)
    assert run_to_end(it.engine, plain, plan)[1] == "aaaa"


def test_the_example_of_the_documentation_works() -> None:
    page = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(  class Loud:.*?)```", page, re.DOTALL)
    names = {"np": np}
    exec(dedent(text), names)
    loud = names["Loud"](vocab=VOCAB, tokenizer=None)
    rows = [asked(("loud", {"ids": [0, 3], "by": 2})), params()]
    for library in LIBRARIES:
        found = logits_behind(library, {"loud": loud}, Z[:2], rows)
        assert (found - Z[:2]).tolist() == [[2, 0, 0, 2, 0, 0, 0], [0] * VOCAB]


BROKEN = """
@hookimpl
def mlxcel_logits_processors():
    return [Named("broken", "cannot be imported", "nowhere_at_all:Thing")]
"""


def test_a_loaded_model_has_the_processors_and_misses_only_what_is_broken(
    third_party: Installer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """design 4: a plugin that fails stops only what needs it, and is told."""
    third_party.install("mine", HEADER + PLUGIN)
    third_party.install("other", HEADER + BROKEN)
    config = EngineConfig.resolve({"model": str(write_tiny_llama(tmp_path / "tiny"))}, environ={})
    entry = [{"name": "prefer", "args": {"text": "c"}}]
    with load_model(config, load(), NoProgress()) as loaded:
        ids = loaded.tokenizer.encode("abc", add_special=False)
        wanted = loaded.tokenizer.encode("c", add_special=False)[0]

        def reply(**given):
            spec = SequenceSpec("r", np.array(ids, np.int32), params(temperature=0, max_tokens=6, **given))
            row = loaded.engine.open(spec)
            output = run_to_end(loaded.engine, row, loaded.planner.build(spec.prompt_ids))[0]
            loaded.engine.close(row)
            return output

        assert reply(logits_processors=entry)[1::2] == (wanted,) * 3
        assert reply()[1::2] != (wanted,) * 3
        with pytest.raises(RequestError, match="no logits processor is called 'broken'"):
            reply(logits_processors=[{"name": "broken"}])
    assert "the logits processor 'broken' of other" in caplog.text
