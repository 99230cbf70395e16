"""One meaning per option, whichever way it comes (docs/spec/clients.md 0.1, 0.2, test 14 of 1.10)."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import click
import pytest

from mlxcel.cli.context import CliContext
from mlxcel.cli.main import program
from mlxcel.config import EngineConfig
from mlxcel.core.params import LoopDetection
from mlxcel.errors import CapacityError, UsageError
from mlxcel.kv_budget import Budget, choose_context
from mlxcel.options import BY_NAME, OPTIONS, Option

SAMPLES = {
    "device": ("cpu", "cpu"),
    "deterministic": ("1", True),
    "offline": ("1", True),
    "no_color": ("1", True),
    "print_token_ids": ("1", True),
    "trace_hooks": ("1", True),
    "max_model_len": ("128", 128),
    "dtype": ("float32", "float32"),
    "kv_cache_budget": ("2G", 2 << 30),
    "gpu_memory_utilization": ("0.5", 0.5),
    "prefill_chunk": ("64", 64),
    "chat_template_kwargs": ('{"a": 1}', {"a": 1}),
    "served_model_name": ("other", ("other",)),
    "max_consecutive_faults": ("3", 3),
    "debug_numerics": ("1", True),
    "loop_detection": ("2,10,5", LoopDetection(2, 10, 5)),
    "force_sync": ("1", True),
    "max_num_seqs": ("7", 7),
    "decode_timeout": ("0.5", 0.5),
    "prefill_grant_interval": ("3", 3),
    "adaptive_prefill_chunk": ("0", False),
    "prefill_chunk_busy": ("3", 3),
    "mixed_step": ("0", False),
    "max_batch_prefill_tokens": ("3", 3),
    "no_preemption": ("1", True),
    "no_warmup": ("1", True),
    "kv_admission_watermark": ("0.5", 0.5),
    "page_size": ("32", 32),
    "enable_prefix_caching": ("0", False),
    "prompt_cache_capacity_bytes": ("2G", 2 << 30),
    "prompt_cache_max_entries": ("7", 7),
    "prompt_cache_ttl": ("1.5", 1.5),
    "prompt_cache_min_prefix": ("9", 9),
    "prompt_cache_file": ("kept.bin", "kept.bin"),
    "max_n": ("3", 3),
    "max_logprobs": ("-1", -1),
    "priority_ageing_seconds": ("3", 3.0),
}


def sample(option: Option) -> tuple[str, object]:
    """A value as text, and what it means."""
    return SAMPLES.get(option.name, ("other", "other"))


def value(config: EngineConfig, option: Option) -> object:
    return getattr(config, option.name)


def test_the_record_has_the_fields_of_the_table() -> None:
    fields = {field.name for field in attrs.fields(EngineConfig)}
    assert fields == {*BY_NAME, "store_root", "cache_root", "state_root", "origins"}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_flag_variable_keyword_and_file_reach_one_value(
    option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, meant = sample(option)
    if option.env:
        config = EngineConfig.resolve(environ={option.env: text})
        assert (value(config, option), config.origins[option.name]) == (meant, "environment")
    config = EngineConfig.resolve({option.name: meant}, environ={})
    assert (value(config, option), config.origins[option.name]) == (meant, "flag")
    for key in option.keys if option.in_file else ():
        file = tmp_path / "mlxcel.toml"
        written = (
            "{a = 1}" if isinstance(meant, dict) else json.dumps(text if option.name == "loop_detection" else meant)
        )
        file.write_text(f"{key} = {written}\n")
        config = EngineConfig.resolve(config_file=str(file), environ={})
        assert (value(config, option), config.origins[option.name]) == (meant, "config")
    for variable in (other.env for other in OPTIONS if other.env):
        monkeypatch.delenv(variable, raising=False)
    many = option.group == "scheduler"
    for flag in option.flags:
        context = CliContext(scheduler=many)
        root = program()
        said = [f"--no-{flag[2:]}"] if option.on_off else [flag] if option.switch else [flag, text]
        arguments = ["serve" if many else "generate", *said]
        with root.make_context("mlxcel", arguments, obj=context) as ctx:
            name, command, rest = root.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
            assert command is not None
            command.make_context(name, rest, parent=ctx)
        assert value(context.config, option) == meant


SCHEDULERS = [option for option in OPTIONS if option.group == "scheduler"]


@pytest.mark.parametrize("option", SCHEDULERS, ids=lambda option: option.name)
def test_a_client_of_one_row_has_no_option_of_the_scheduler(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 0.2: `generate` refuses the flags and does not read the variables, be they well-formed or not."""
    assert option.env
    for text in (sample(option)[0], "nonsense"):
        monkeypatch.setenv(option.env, text)
        assert value(CliContext().config, option) == option.default
    for flag in option.flags:
        with program().make_context("mlxcel", ["generate"], obj=CliContext()) as ctx:
            name, command, _ = program().resolve_command(ctx, ["generate"])
            assert command is not None
            with pytest.raises(click.UsageError):  # no such option; `-np` reads as `-n p`, and p is no number
                command.make_context(name, [flag], parent=ctx)


def test_numbers_of_the_scheduler_are_bounded() -> None:
    for name, bad in (
        ("prefill_grant_interval", 0),
        ("prefill_grant_interval", 4097),
        ("kv_admission_watermark", 0.51),
        ("kv_admission_watermark", float("nan")),
        ("decode_timeout", -1),
        ("priority_ageing_seconds", "10"),
        ("max_num_seqs", 0),
        ("mixed_step", 1),
    ):
        with pytest.raises(UsageError, match=name):
            EngineConfig.resolve({name: bad}, environ={})


def test_forms_of_loop_detection(tmp_path: Path) -> None:
    """Spec F16, F19: `off` can take back what a variable or a file says."""
    for said, meant in (
        ("on", LoopDetection(1, 20, 12)),
        ([0, 5, 3], LoopDetection(1, 5, 3)),
        ({"min_count": 3}, LoopDetection(1, 20, 3)),
        (LoopDetection(2, 3, 4), LoopDetection(2, 3, 4)),
    ):
        assert EngineConfig.resolve({"loop_detection": said}, environ={}).loop_detection == meant
    config = EngineConfig.resolve({"loop_detection": "off"}, environ={"MLXCEL_LOOP_DETECTION": "on"})
    assert (config.loop_detection.on, config.origins["loop_detection"]) == (False, "flag")
    assert not EngineConfig.resolve(environ={}).loop_detection.on
    for bad in ("yes", "1,2", "1,2,x", "1,65,12", "1,20,1001", "5,3,2", "1,2,3,4", "-1,2,3", [1, 2], True, 5, {"a": 1}):
        with pytest.raises(UsageError, match=r"loop_detection is .* it must be off, on, or MIN,MAX,COUNT"):
            EngineConfig.resolve({"loop_detection": bad}, environ={})
    with pytest.raises(UsageError, match="MLXCEL_LOOP_DETECTION"):
        EngineConfig.resolve(environ={"MLXCEL_LOOP_DETECTION": "maybe"})


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "mlxcel.toml"
    file.write_text("ctx_size = 1\nprefill_chunk = 1\ndtype = 'float16'\n")
    environ = {"MLXCEL_CTX_SIZE": "2", "MLXCEL_PREFILL_CHUNK": "2", "MLXCEL_CONFIG": str(file)}
    config = EngineConfig.resolve({"max_model_len": 3}, environ=environ)
    assert (config.max_model_len, config.prefill_chunk, config.dtype, config.sampler) == (3, 2, "float16", "chain")
    names = ("max_model_len", "prefill_chunk", "dtype", "sampler")
    assert [config.origins[name] for name in names] == ["flag", "environment", "config", "default"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ctx_sise = 1", "ctx_size"),
        ("ctx_size = 'many'", "must be an integer"),
        ("ctx_size = true", "must be an integer"),
        ("ctx_size = 1\nmax_model_len = 1", "one option"),
        ("ctx_size = ", "not valid TOML"),
        ("chat_template = '{{ a }}'\nchat_template_file = 'f'", "both given"),
    ],
)
def test_a_file_that_cannot_be_obeyed(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mlxcel.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        EngineConfig.resolve(config_file=str(file), environ={})
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_empty_variables() -> None:
    config = EngineConfig.resolve(environ={"MLXCEL_CTX_SIZE": "", "MLXCEL_PLUGINS": ""})
    assert (config.max_model_len, config.plugins) == (0, "")
    assert EngineConfig.resolve(environ={}).plugins is None


@pytest.mark.parametrize("text", ["yes", "true", "2", " 1"])
def test_switches_take_1_and_0(text: str) -> None:
    with pytest.raises(UsageError, match="MLXCEL_SDPA_DETERMINISTIC"):
        EngineConfig.resolve(environ={"MLXCEL_SDPA_DETERMINISTIC": text})
    assert EngineConfig.resolve(environ={"MLXCEL_SDPA_DETERMINISTIC": "0"}).deterministic is False


@pytest.mark.parametrize(
    ("asked", "budget", "positions"),
    [(0, 1 << 30, 2048), (0, 10 * 1280, 1280), (300, 10 * 384, 300), (0, 10 * 1400, 1280), (2048, 10 * 2048, 2048)],
)
def test_v20_a_context_that_fits(asked: int, budget: int, positions: int) -> None:
    """Spec V20: 10 bytes a position, a window of 2048; rows take whole blocks of 128."""
    context = choose_context(asked, 2048, Budget(budget, explicit=True), lambda n: 10 * n)
    assert context.positions == positions
    assert (context.lowered is not None) == (asked == 0 and positions < 2048)


def test_v20_an_explicit_context_that_does_not_fit_names_the_largest() -> None:
    """Spec V20."""
    with pytest.raises(UsageError, match="300") as caught:
        choose_context(300, 2048, Budget(10 * 383, explicit=True), lambda n: 10 * n)
    assert "--ctx-size 256" in str(caught.value.hint)
    with pytest.raises(UsageError, match="window of 2048"):
        choose_context(2049, 2048, Budget(1 << 30, explicit=False), lambda n: 10 * n)
    with pytest.raises(UsageError):
        choose_context(0, 2048, Budget(10 * 127, explicit=True), lambda n: 10 * n)
    with pytest.raises(CapacityError):
        choose_context(0, 2048, Budget(10 * 127, explicit=False), lambda n: 10 * n)


def test_a_client_of_one_row_does_not_read_how_many(tmp_path: Path) -> None:
    """docs/spec/clients.md 0.2: `run` has one row, whatever a variable or a file says."""
    file = tmp_path / "mlxcel.toml"
    file.write_text("max_num_seqs = 7\npage_size = 32\n")
    config = EngineConfig.resolve(config_file=str(file), environ={"MLXCEL_PARALLEL": "many"}, one_row=True)
    assert (config.max_num_seqs, config.origins["max_num_seqs"], config.page_size) == (1, "default", 32)
    assert EngineConfig.resolve(config_file=str(file), environ={"MLXCEL_PARALLEL": "3"}).max_num_seqs == 3


def test_the_folder_for_state() -> None:
    def folder(**environ: str) -> Path | None:
        return EngineConfig.resolve(environ={"MLXCEL_MODELS_DIR": "/models", **environ}).state_root

    assert folder(HOME="/home/a", XDG_STATE_HOME="/state") == Path("/state/mlxcel")
    assert folder(HOME="/home/a", XDG_STATE_HOME="state") == Path("/home/a/.local/state/mlxcel")
    assert folder(HOME="/home/a") == Path("/home/a/.local/state/mlxcel")
