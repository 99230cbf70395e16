"""The defaults of all clients: docs/spec/engine.md 9 against the code, and what of them is seen from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
import pytest
from cli_runs import Cli
from parameter_tables import lines

from mlxcel import LLM
from mlxcel.cli.generate import command as generate_command
from mlxcel.cli.sampling_options import SAMPLING_FLAGS
from mlxcel.config import EngineConfig
from mlxcel.core.backend import BackendCaps, Level
from mlxcel.core.param_table import CLIENT_DEFAULTS, FIELDS
from mlxcel.core.params import SamplingParams
from mlxcel.core.prompt_ids import check_prompt
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.core.stage_order import STAGE_NAMES
from mlxcel.errors import ContextTooLong
from mlxcel.kv_setup import Rows, page_size
from mlxcel.load import load_model
from mlxcel.local_client import WAITING
from mlxcel.memory_plan import HOST_SHARE, storage_name
from mlxcel.option_values import LOOP_DETECTION
from mlxcel.options import BY_NAME
from mlxcel.plugins.manager import PluginManager
from mlxcel.serve_engine import serve
from mlxcel.server.settings import ServerSettings, serving_config
from mlxcel.text.end_ids import end_ids
from mlxcel.text.generation_config import GenerationDefaults
from mlxcel.tools.regression import BETTER, LONG, may_lose
from mlxcel_reference_numpy.backend import NumpyBackend

ROOT = Path(__file__).parent.parent
TABLE = {line[0]: line[1:] for line in lines("engine.md", "## 9. Defaults")}
"""By id: what it is the default of, the unified value, who differs, the reason."""


def numbers(text: str) -> list[float]:
    return [float(each.replace("−", "-")) for each in re.findall(r"(?<![\w.])[-−]?[0-9]+(?:\.[0-9]+)?", text)]


def told(row: str) -> tuple[list[float], list[float]]:
    """The numbers of the unified value, and of those who differ."""
    return numbers(TABLE[row][1]), numbers(TABLE[row][2])


def config(**given: Any) -> EngineConfig:
    return EngineConfig.resolve(given, environ={"HOME": "/nowhere"})


def caps(platform: str = "cpu", level: Level = "R2") -> BackendCaps:
    return BackendCaps(level, platform, "a test", "float32", (64, 16), run_ahead=True, mixed_steps=True)


def default(name: str) -> Any:
    return BY_NAME[name].default


def sampled(client: str, *fields: str) -> list[Any]:
    values = {**attrs.asdict(SamplingParams(), recurse=False), **CLIENT_DEFAULTS[client]}
    return [values[field] for field in fields]


def everywhere(*fields: str) -> list[Any]:
    """The one value that each field has for every client."""
    (found,) = {tuple(sampled(client, *fields)) for client in CLIENT_DEFAULTS}
    return list(found)


# --- each row of the table --------------------------------------------------------------------------------------------


def one_engine() -> None:
    """Nothing but the engine gives steps to a backend."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "mlxcel").rglob("*.py")}
    found = {path.relative_to(ROOT).as_posix() for path, text in texts.items() if re.search(r"backend\.submit\(", text)}
    assert found == {"mlxcel/core/engine.py"}


def neutral() -> None:
    fields = ("temperature", "top_k", "top_p", "min_p")
    unified, differs = told("D2")
    assert (sampled("lib", *fields), [*sampled("cli", *fields), *sampled("srv", *fields)]) == (unified, differs)


def reachable() -> None:
    ours = {field.name for field in FIELDS if "srv" in field.clients}
    assert len(ours) > 3
    assert ours <= {flag.field for flag in SAMPLING_FLAGS} & {field.name for field in attrs.fields(SamplingParams)}


def from_the_model() -> None:
    assert f"(`{default('generation_config')}`)" in TABLE["D4"][1]
    assert f"srv `{serving_config(config()).generation_config}`" in TABLE["D4"][2]
    assert serving_config(config(generation_config="none")).generation_config == "none"


def repetition() -> None:
    assert everywhere("repeat_last_n", "repetition_penalty") == told("D5")[0]


def penalties() -> None:
    values = everywhere("frequency_penalty", "presence_penalty", "window_frequency_penalty", "window_presence_penalty")
    assert values == told("D6")[0] * 4


def dry() -> None:
    assert everywhere("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n") == told("D7")[0]
    assert "four string breakers" in TABLE["D7"][1]
    assert len(everywhere("dry_sequence_breakers")[0]) == 4


def switched_off() -> None:
    off = {
        "xtc_probability": 0, "typical_p": 1, "top_n_sigma": -1, "dynatemp_range": 0, "mirostat": 0,
        "adaptive_target": -1, "min_keep": 0,
    }  # fmt: skip
    assert everywhere(*off) == list(off.values())


def stage_order() -> None:
    assert everywhere("samplers") == [None]
    assert STAGE_NAMES[:2] == ("penalties", "dry")
    assert STAGE_NAMES.index("temperature") > max(map(STAGE_NAMES.index, ("top_k", "top_p", "min_p", "xtc")))


def to_the_context() -> None:
    assert everywhere("max_tokens") == told("D11")[0]


def never_past_the_context() -> None:
    check_prompt(np.zeros(7, np.int32), vocab=9, context=8)
    with pytest.raises(ContextTooLong, match=r"the prompt is 8 tokens, the context holds 8"):
        check_prompt(np.zeros(8, np.int32), vocab=9, context=8)


def all_ends() -> None:
    generation = GenerationDefaults(eos_ids=(2,))
    found = end_ids({"eos_token_id": [1], "text_config": {"eos_token_id": 3}}, generation, None, (4,), 9)
    assert found.ids == {1, 2, 3, 4}


def stop_strings() -> None:
    assert everywhere("stop", "include_stop_str_in_output") == [(), False]


def loops() -> None:
    on = LOOP_DETECTION.from_text("on")
    assert [on.min_pattern, on.max_pattern, on.min_count] == told("D15")[0]
    assert default("loop_detection") == LOOP_DETECTION.from_text("off")
    assert everywhere("loop_detection") == [None]


def logprobs() -> None:
    assert everywhere("logprobs", "prompt_logprobs", "logprobs_mode") == [None, None, "raw"]


def raw_is_asked_for() -> None:
    assert flag("raw") is False
    assert "`generate --raw`" in TABLE["D17"][2]


def reasoning() -> None:
    assert everywhere("reasoning_format") == [TABLE["D18"][1].strip("`")]
    assert flag("show_reasoning") is False


def flag(name: str) -> Any:
    (found,) = [parameter for parameter in generate_command.params if parameter.name == name]
    assert isinstance(found, click.Option)
    return found.get_default(click.Context(generate_command))


def kept_prompts() -> None:
    found = [default("prompt_cache_min_prefix"), default("prompt_cache_ttl")]
    assert (found, default("prompt_cache_capacity_bytes")) == (told("D20")[0], None)


def rows_and_queue() -> None:
    few, many, waiting = told("D21")[0]
    assert [Rows.of(config(), caps(platform)).most for platform in ("cpu", "cuda")] == [few, many]
    assert [ServerSettings().max_queue_depth, WAITING] == [waiting, waiting]
    assert EngineConfig.resolve({}, environ={"HOME": "/"}, one_row=True).max_num_seqs == told("D21")[1][0]


def turns() -> None:
    assert [default("prefill_grant_interval"), default("priority_ageing_seconds")] == told("D22")[0]


def preemption() -> None:
    assert (default("no_preemption"), [default("kv_admission_watermark")]) == (False, told("D23")[0])


def kv_budget() -> None:
    assert default("kv_cache_budget") is None
    assert [default("gpu_memory_utilization")] == told("D24")[0]
    assert "half of free host memory" in TABLE["D24"][1]
    assert HOST_SHARE == 0.5


def pages() -> None:
    assert page_size(config(), caps()) == caps().page_sizes[0]


def special_tokens() -> None:
    assert everywhere("skip_special_tokens") == [True]


def levels() -> None:
    assert default("deterministic") is False
    assert NumpyBackend().caps.level == NumpyBackend(deterministic=True).caps.level == "R2"


def run_ahead() -> None:
    assert SchedulerSettings.resolve(caps(), "R2", chunk=64, force_sync=default("force_sync")).run_ahead
    assert not SchedulerSettings.resolve(caps(), "R2", chunk=64, force_sync=True).run_ahead
    assert BY_NAME["force_sync"].env in TABLE["D28"][2]


def guards() -> None:
    found = [default("max_consecutive_faults"), default("decode_timeout"), ServerSettings().shutdown_timeout]
    assert found == told("D29")[0]
    assert EngineSettings(9, 9, 1, 9).max_consecutive_faults == found[0]


def busy_chunk() -> None:
    (most,) = {int(each) for each in numbers(TABLE["D33"][1])}
    assert default("prefill_chunk_busy") == most
    resolved = [SchedulerSettings.resolve(caps(), "R2", chunk=chunk).chunk_busy for chunk in (64, 4096)]
    assert resolved == [64, most]
    assert [SchedulerSettings.resolve(caps(), level, chunk=64).chunk_busy for level in ("R0", "R1")] == [None, None]


def fresh_seed() -> None:
    assert everywhere("seed") == [-1]


def measured() -> None:
    """These stand in docs/adr/0007-unified-batch-native-engine.md: test_decisions.py."""
    assert default("prefill_chunk") >= 1
    assert storage_name(config(), 4) == "paged"
    assert min(may_lose(figure, prompt) for figure in BETTER for prompt in (1, LONG)) > 0


CHECKS: dict[str, Callable[[], None]] = {
    "D1": one_engine, "D2": neutral, "D3": reachable, "D4": from_the_model, "D5": repetition, "D6": penalties,
    "D7": dry, "D8": switched_off, "D9": stage_order, "D10": fresh_seed, "D11": to_the_context,
    "D12": never_past_the_context, "D13": all_ends, "D14": stop_strings, "D15": loops, "D16": logprobs,
    "D17": raw_is_asked_for, "D18": reasoning, "D20": kept_prompts, "D21": rows_and_queue, "D22": turns,
    "D23": preemption, "D24": kv_budget, "D25": pages, "D26": special_tokens, "D27": levels, "D28": run_ahead,
    "D29": guards, "D30": measured, "D31": measured, "D32": measured, "D33": busy_chunk,
}  # fmt: skip
OBSERVED = {"D19"}
"""Rows whose value is a behaviour that the tests below look at."""


def test_every_row_of_the_table_is_checked() -> None:
    assert set(TABLE) == set(CHECKS) | OBSERVED
    assert list(TABLE) == [f"D{number}" for number in range(1, 34)]


@pytest.mark.parametrize("row", CHECKS)
def test_defaults_are_those_of_the_table(row: str) -> None:
    """D1 to D33."""
    CHECKS[row]()


# --- from outside -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], store: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(store))
    return Cli(monkeypatch, capfdbinary)


def test_prompts_are_kept_where_there_is_a_second_one(store: Path) -> None:
    """D19: the library keeps them; `generate`'s engine has nothing that could."""
    options: dict[str, Any] = {"backend": "reference-numpy", "max_model_len": 128}
    environ = {"MLXCEL_MODELS_DIR": str(store), "HOME": str(store)}
    asked = EngineConfig.resolve({**options, "model": "tiny"}, environ=environ)
    manager = PluginManager.load(only=(), trace=None)
    with load_model(asked, manager, NoProgress()) as alone:
        assert (alone.cache, alone.kv_storage) == (None, storage_name(asked, 1))  # D31 too
        assert alone.engine.settings.slots == 1
    with LLM(str(store / "tiny"), **options) as llm:
        first, second = (llm.generate("x" * 60, SamplingParams(max_tokens=1))[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 59)


def test_one_turn_keeps_no_prompt(cli: Cli) -> None:
    """D19: of `generate` and `run -p` each prompt is evaluated whole."""
    for command in ("generate", "run"):
        ran = cli(command, "tiny", "-p", "x" * 60, "-n", 1, "--json", "--backend", "reference-numpy")
        assert json.loads(ran.out)["timings"]["cache_n"] == 0
    for name in ("--prompt-cache", "--parallel", "--decode-timeout"):
        assert cli("generate", "tiny", "-p", "x", name, "1").code == 2  # D21, D29


def test_a_command_line_repeats_itself_and_says_what_it_applied(cli: Cli) -> None:
    """D2, D10, D18: greedy, with the seed that nobody gave reported."""
    replies = [
        json.loads(cli("generate", "tiny", "-p", "hi", "-n", 4, "--json", "--backend", "reference-numpy").out)
        for _ in range(2)
    ]
    assert replies[0]["token_ids"] == replies[1]["token_ids"]
    fields = ("temperature", "top_k", "top_p", "min_p")
    assert [replies[0]["sampling"][field] for field in fields] == sampled("cli", *fields)
    assert replies[0]["sampling"]["seed"] != replies[1]["sampling"]["seed"]


def test_generation_defaults_of_a_model_are_a_servers_alone(cli: Cli, tmp_path: Path) -> None:
    """D4: `generate` takes the ends of generation_config.json and leaves its temperature."""
    assert cli("download", "tiny").code == 0
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(cli("download", "tiny").out.strip()).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "temperature": 0.3, "top_k": 7}))
    asked = ("generate", folder, "-p", "hi", "-n", 1, "--json", "--backend", "reference-numpy")
    for more, values in (((), [0.0, 0]), (("--generation-config", "auto"), [0.3, 7])):
        found = json.loads(cli(*asked, *more).out)["sampling"]
        assert [found["temperature"], found["top_k"]] == values


@pytest.mark.parametrize("variable", ["", "1"])
def test_steps_run_ahead_unless_a_variable_says_otherwise(store: Path, variable: str) -> None:
    """D28."""
    environ = {"MLXCEL_MODELS_DIR": str(store), "HOME": str(store), "MLXCEL_FORCE_SYNC": variable}
    asked = EngineConfig.resolve({"model": "tiny", "backend": "reference-numpy"}, environ=environ)
    serving = serve(asked, PluginManager.load(only=(), trace=None), NoProgress(), max_queue_depth=1)
    try:
        row = SequenceSpec("row", np.array([5, 6], np.int32), SamplingParams(temperature=0, seed=0, max_tokens=9))
        (result,) = serving.scheduler.submit(Request((row,))).results()
        ahead = serving.scheduler.stats().steps_ahead_total
    finally:
        serving.close()
    assert len(result.token_ids) == 9
    assert (ahead > 0) is not bool(variable)
