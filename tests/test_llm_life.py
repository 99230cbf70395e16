"""LLM (docs/spec/clients.md 2): its options, faults, interrupts, threads, and its end."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llm_rows import BACKEND, ENDLESS, GREEDY, HELLO, engine_threads, ids, mixed
from other_threads import PATIENCE, idle
from plugin_doubles import Installer
from script_llm import script_options
from tiny_checkpoint import BOS, write_json, write_tiny_llama

from mlxcel import LLM, SamplingParams
from mlxcel.asked import indexed, own
from mlxcel.errors import BackendFault, CheckpointError, ContextTooLong, MlxcelError, RequestError, RowFault, UsageError
from mlxcel.gather import Gathered
from mlxcel.load import LoadedModel
from mlxcel.local_client import LocalClient


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, backend=BACKEND, max_num_seqs=3) as made:
        yield made


@pytest.fixture
def script(third_party: Installer, tmp_path: Path) -> Iterator[LLM]:
    with LLM(**script_options(third_party, tmp_path), max_num_seqs=4) as made:
        yield made


# --- defaults --------------------------------------------------------------------------------------------------------


def test_values_that_were_not_given_come_from_the_model_where_that_is_asked_for(tmp_path: Path) -> None:
    """Each field alone (docs/spec/clients.md 0.1): temperature 1 that is said holds, one that is not said does not."""
    folder = write_tiny_llama(tmp_path / "tiny")
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 3], "temperature": 0.5, "top_k": 7})
    with LLM(folder, backend=BACKEND, generation_config="auto") as llm:
        taken = [
            llm.generate("a", params)[0].sampling_params
            for params in (
                SamplingParams(max_tokens=1),
                SamplingParams(temperature=1.0, max_tokens=1),
                SamplingParams(top_k=0, max_tokens=1),
            )
        ]
        assert [(each.temperature, each.top_k) for each in taken if each] == [(0.5, 7), (1.0, 7), (0.5, 0)]
    with LLM(folder, backend=BACKEND) as llm:
        each = llm.generate("a", SamplingParams(max_tokens=1))[0].sampling_params
        assert each is not None
        assert (each.temperature, each.top_k) == (1.0, 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_a_copy_of_parameters_knows_what_was_given(copied: Callable[[SamplingParams], SamplingParams]) -> None:
    params = SamplingParams(temperature=1.0, stop=["x"], seed=None)
    assert params.given == {"temperature", "stop", "seed"}
    assert (copied(params), copied(params).given) == (params, params.given)
    assert params.clone(top_k=3).given == {*params.given, "top_k"}
    assert SamplingParams.from_optional(top_k=None, n=2).given == {"n"}
    assert SamplingParams(temperature=1.0) == SamplingParams()  # what was given is no part of the value


def test_errors_that_rows_share_are_raised_apart() -> None:
    shared = BackendFault("the device is gone", kv_intact=False)
    first, second = (indexed(own(shared), index, ()) for index in (0, 1))
    assert isinstance(first, BackendFault)
    assert (first.message, first.hint, first.kv_intact) == (shared.message, shared.hint, False)
    assert (first.index, vars(second)["index"], shared.index, first.__cause__) == (0, 1, None, shared)


def test_engine_options_are_keywords(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_modellen': did you mean 'max_model_len'\?"):
        LLM(model, max_modellen=5)
    for name in ("print_token_ids", "force_sync", "no_color"):
        with pytest.raises(TypeError, match=name):
            LLM(model, **{name: True})
    with pytest.raises(UsageError, match="prefill_chunk is 0"):
        LLM(model, prefill_chunk=0)
    with pytest.raises(TypeError, match="api_key without base_url"):
        LLM(model, api_key="k")
    monkeypatch.setenv("MLXCEL_CTX_SIZE", "64")
    with LLM(model, backend=BACKEND) as llm, pytest.raises(ContextTooLong, match="holds 64"):
        llm.generate([[5] * 64])
    with LLM(model, backend=BACKEND, max_model_len=32) as llm:
        assert llm.generate("hi", ENDLESS)[0].outputs[0].finish_cause == "context"


def test_another_tokenizer_takes_the_models_place(model: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", tokenizer_size=290)
    with LLM(model, backend=BACKEND, tokenizer=other) as llm:
        assert llm.get_tokenizer().size == 290
        assert llm.generate("hello", GREEDY)[0].finished
    large = write_tiny_llama(tmp_path / "large", tokenizer_size=330, vocab=330)
    with pytest.raises(CheckpointError, match="330 tokens, the model's vocabulary holds 320"):
        LLM(model, backend=BACKEND, tokenizer=str(large))


def test_texts_and_ids(llm: LLM) -> None:
    assert llm.detokenize(llm.tokenize("in the end", add_special_tokens=False)) == "in the end"
    assert llm.detokenize(llm.tokenize("in")) == f"{BOS}in"
    assert llm.detokenize(llm.tokenize("in"), skip_special_tokens=True) == "in"
    assert llm.detokenize([]) == ""
    with pytest.raises(RequestError, match=r"ids\[0\] is 320"):
        llm.detokenize([320])
    with pytest.raises(RequestError, match="text is 5"):
        llm.tokenize(5)


def test_the_prompt_cache_is_seen_and_changes_no_id(llm: LLM, model: Path) -> None:
    """Test 10 of 2.3: the second turn of a conversation begins with what the first one left."""
    llm.reset_prefix_cache()
    first = llm.chat([{"role": "user", "content": "the " * 40}], GREEDY.clone(max_tokens=30))[0]
    turns = [
        {"role": "user", "content": "the " * 40},
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "more"},
    ]
    second = llm.chat(turns, GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens > 0) == (0, True)
    assert second.metrics is not None
    assert second.metrics["cache_n"] == second.num_cached_tokens
    with LLM(model, backend=BACKEND, enable_prefix_caching=False) as cold:
        plain = cold.chat(turns, GREEDY)[0]
        assert (plain.num_cached_tokens, ids(plain)) == (0, ids(second))
        cold.reset_prefix_cache()
        assert cold.stats()["prompt_cache"] is None
    llm.reset_prefix_cache()
    assert llm.chat(turns, GREEDY)[0].num_cached_tokens == 0


def test_stats_are_plain_numbers(llm: LLM) -> None:
    stats = json.loads(json.dumps(llm.stats()))
    assert set(stats) == {"scheduler", "kv", "prompt_cache"}
    assert stats["scheduler"]["rows_total"] == 3


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_row_that_fails_leaves_the_others(script: LLM) -> None:
    prompts = ["one", "oh! no", "three", "a!"]
    returned = script.generate(prompts, on_error="return")
    assert [output.outputs[0].text for output in returned] == ["one", "oh", "three", "a"]
    assert [type(output.error) for output in returned] == [type(None), RowFault, type(None), RowFault]
    assert [output.outputs[0].finish_cause for output in returned] == ["eos", "error", "eos", "error"]
    assert returned[1].outputs[0].finish_reason is None
    with pytest.raises(RowFault) as caught:
        script.generate(prompts)
    assert caught.value.index == 1
    assert [output.outputs[0].text for output in caught.value.outputs] == ["one", "oh", "three", "a"]
    with pytest.raises(RowFault) as caught:
        list(script.stream("oh! no"))
    assert caught.value.outputs[0].outputs[0].text == "oh"
    assert script.generate("fine")[0].outputs[0].text == "fine"
    assert idle(script)


@pytest.mark.parametrize("place", [(LocalClient, "begin"), (Gathered, "take")])
def test_an_interrupt_cancels_the_rows_and_the_object_stays_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    kind, name = place
    real, calls = getattr(kind, name), []

    def interrupted(self: object, *arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the", "in", "a", "or"], ENDLESS)
    assert idle(llm)
    assert ids(llm.generate("hello", GREEDY)[0])


def test_calls_from_four_threads_share_the_engine(llm: LLM) -> None:
    prompts = mixed(12)
    alone = [ids(llm.generate([prompt], GREEDY)[0]) for prompt in prompts]
    found: dict[int, list[tuple[int, ...]]] = {}

    def call(number: int) -> None:
        turned = prompts[number:] + prompts[:number]
        found[number] = [ids(output) for output in llm.generate(turned, GREEDY)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: alone[number:] + alone[:number] for number in range(4)}


def test_two_engines_share_nothing(model: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=3)
    with LLM(model, backend=BACKEND) as one, LLM(other, backend=BACKEND) as two:
        first, second = one.generate("hello", GREEDY)[0], two.generate("hello", GREEDY)[0]
        assert ids(first) != ids(second)
        assert one.stats()["scheduler"]["request_started_total"] == 1
        one.close()
        assert ids(two.generate("hello", GREEDY)[0]) == ids(second)
    with pytest.raises(UsageError, match=r"1048576 bytes for 2048 positions, 1000 bytes of KV budget"):
        LLM(model, backend=BACKEND, kv_cache_budget=1000)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_close_ends_everything_and_may_be_called_again(model: Path) -> None:
    before = engine_threads()
    llm = LLM(model, backend=BACKEND)
    stream = llm.stream("hello", ENDLESS)
    next(stream)
    backend = weakref.ref(llm._client._serving.model.engine._backend)
    llm.close()
    llm.close()
    assert engine_threads() <= before
    with pytest.raises(MlxcelError):
        list(stream)
    taking = {"a": ("generate", "stream", "tokenize"), (): ("generate", "detokenize"), None: ("stats", "get_tokenizer")}
    chats = ("chat", "stream_chat", "apply_chat_template")
    uses = [(name, (value,)) for value, names in taking.items() for name in names]
    for name, arguments in [*uses, *((name, (HELLO,)) for name in chats), ("reset_prefix_cache", (None,))]:
        with pytest.raises(RuntimeError, match="closed"):
            getattr(llm, name)(*(value for value in arguments if value is not None))
    del llm, stream
    gc.collect()
    assert backend() is None


def test_a_with_block_closes_on_an_exception(model: Path) -> None:
    before = engine_threads()
    with pytest.raises(ZeroDivisionError), LLM(model, backend=BACKEND) as llm:
        raise ZeroDivisionError
    assert engine_threads() <= before
    with pytest.raises(RuntimeError):
        llm.generate("a")


def test_an_object_that_is_dropped_ends_its_thread(model: Path) -> None:
    before = engine_threads()
    llm = LLM(model, backend=BACKEND)
    llm.generate(["hello", "in"], GREEDY)
    backend = weakref.ref(llm._client._serving.model.engine._backend)
    del llm
    gc.collect()
    for thread in engine_threads() - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    gc.collect()
    assert backend() is None


def test_a_model_that_cannot_be_served_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler option that the level refuses is found behind the load: the weights go again."""
    before, backends = engine_threads(), []

    def refused(config: object, model: LoadedModel, max_queue_depth: int) -> None:
        backends.append(weakref.ref(model.engine._backend))
        raise UsageError("not at this level")

    monkeypatch.setattr("mlxcel.serve_engine.scheduler_settings", refused)
    with pytest.raises(UsageError, match="not at this level"):
        LLM(model, backend=BACKEND)
    gc.collect()
    assert engine_threads() <= before
    assert [backend() for backend in backends] == [None]


def test_bars_are_drawn_only_when_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capfd.readouterr() == ("", "")
    llm.generate(["a", "b"], GREEDY, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "2 prompts" in err
