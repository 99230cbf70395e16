"""`mlxcel inspect` (docs/spec/clients.md 1.8, test 11 of 1.10): what it says, and that the loader says the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from cli_runs import Cli
from hollow_checkpoint import GEMMA3, MIXTRAL, SMOLLM2, write_hollow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_doubles import tiny_source
from tiny_checkpoint import write_tiny_gguf, write_tiny_llama

from mlxcel import inspection, memory_plan
from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.errors import MlxcelError
from mlxcel.host_memory import HostMemory
from mlxcel.inspect_model import inspect_model
from mlxcel.load import load_model
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.manager import PluginManager
from mlxcel.plugins.sources import smollm2
from mlxcel.store.record import StoredFile, StoredModel, write_record

GIB = 1 << 30
CLOSE = 0.1
"""Of the measured bytes (docs/spec/clients.md 1.10, 11)."""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Cli:
    monkeypatch.setenv("MLXCEL_MODELS_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(memory_plan, "host_memory", lambda: HostMemory(64 * GIB, 32 * GIB))
    return Cli(monkeypatch, capfdbinary)


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsCheckpoint, "read", read)


def answer(cli: Cli, *arguments: object) -> dict[str, Any]:
    ran = cli("inspect", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


def keys(record: type) -> list[str]:
    return [field.name for field in attrs.fields(record)]


# --- what it says --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_reads")
def test_smollm2_from_headers_alone(cli: Cli, tmp_path: Path) -> None:
    """The keys of --json, all of them, and the numbers of the default model by hand."""
    folder = write_hollow(tmp_path / "hollow", SMOLLM2)
    assert answer(cli, folder, "--backend", "reference-numpy") == {
        "name": "hollow",
        "source": "path",
        "path": str(folder),
        "disk_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "format": "safetensors",
        "quantisation": "bfloat16",
        "architecture": "llama",
        "family": "llama",
        "shapes": {
            "V": 49152, "D": 576, "H": 9, "K": 3, "d": 64, "F": 1536, "L": 30, "context": 8192,
            "full_layers": 30, "window_layers": 0, "windows": [], "recurrent_layers": 0,
            "experts": None, "experts_per_token": None,
        },
        "parameters": {"total": 134_515_008, "active": 134_515_008},
        "weights": {
            "tensors": 272,
            "disk_bytes": 269_030_016,
            "device_bytes": {"float32": 538_060_032, "bfloat16": 269_030_016, "float16": 269_030_016},
        },
        "unused": {"count": 0, "bytes": 0, "names": []},
        "kv": {
            "full_per_token": 46_080, "window_per_token": 0, "window_per_row": 0, "state_per_row": 0,
            "row": 8192 * 46_080,
        },
        "memory": {"kind": "host", "total": 64 * GIB, "free": 32 * GIB, "share": 0.5},
        "fit": {
            "dtype": "float32", "ctx_size": 8192, "prefill_chunk": 2048, "parallel": 1,
            "weight_bytes": 538_060_032, "workspace_bytes": 83_460_096, "margin_bytes": 0,
            "kv_budget_bytes": (32 * GIB - 538_060_032 - 83_460_096) // 2,
            "needed_bytes": 538_060_032 + 83_460_096 + 8192 * 46_080,
            "fits": True, "context": 8192, "reason": None, "hint": None,
            "tokens": (32 * GIB - 621_520_128) // 2 // (128 * 46_080) * 128,
            "tokens_per_row": 8192, "rows_at_full_context": (32 * GIB - 621_520_128) // 2 // 377_487_360,
        },
        "unsupported": [],
    }  # fmt: skip


@pytest.mark.usefixtures("no_reads")
def test_windows_and_another_machine(cli: Cli, tmp_path: Path) -> None:
    folder = write_hollow(tmp_path / "hollow", GEMMA3)
    asked = ("--dtype", "bfloat16", "--device-memory", "1800M", "--parallel", 4)
    found = answer(cli, folder, *asked)
    assert found["memory"] == {"kind": "device", "total": 1800 << 20, "free": 1800 << 20, "share": 0.9}
    assert (found["shapes"]["full_layers"], found["shapes"]["window_layers"], found["shapes"]["windows"]) == (
        3,
        15,
        [512],
    )
    assert found["kv"] == {
        "full_per_token": 3072,
        "window_per_token": 15_360,
        "window_per_row": 41_287_680,
        "state_per_row": 0,
        "row": 32768 * 3072 + 41_287_680,
    }
    fit = found["fit"]
    assert fit["margin_bytes"] == 4 * 262144 * 640, "the embedding, in float32"
    assert fit["kv_budget_bytes"] == int(0.9 * 1800 * (1 << 20)) - 536_196_352 - fit["workspace_bytes"] - 671_088_640
    assert (fit["fits"], fit["parallel"], fit["context"]) == (True, 4, 32768), "rows share one pool of pages"
    assert fit["kv_budget_bytes"] >= 32768 * 3072 + 4 * 41_287_680
    assert fit["rows_at_full_context"] == 2
    assert answer(cli, folder, *asked, "--prefill-chunk", 256)["kv"]["window_per_row"] == 896 * 15_360


def test_a_machine_that_is_too_small(cli: Cli, tmp_path: Path) -> None:
    """The same command for a machine where it fits, one where less context does, and one where the weights do not."""
    folder = write_hollow(tmp_path / "hollow", SMOLLM2)
    fits = [answer(cli, folder, "--device-memory", size)["fit"] for size in ("2G", "1469M", "100M")]
    assert [fit["fits"] for fit in fits] == [True, True, False]
    assert [fit["context"] for fit in fits] == [8192, 4864, None]
    assert fits[0]["reason"] is None
    assert "instead of the model's 8192" in fits[1]["reason"]
    assert "538060032 bytes of weights" in fits[2]["reason"]
    assert (fits[2]["tokens"], fits[2]["rows_at_full_context"], fits[2]["kv_budget_bytes"]) == (0, 0, 0)
    ran = cli("inspect", folder, "--device-memory", "100M")
    assert ran.code == 0
    assert "fits          no: the model does not fit" in ran.out
    asked = ("--ctx-size", 8192, "--kv-cache-budget", "64M")
    fit = answer(cli, folder, *asked)["fit"]
    assert (fit["fits"], fit["hint"]) == (False, "the largest that fits is --ctx-size 1408; or raise --kv-cache-budget")
    assert f"hint          {fit['hint']}" in cli("inspect", folder, *asked).out


def test_the_chunk_changes_the_workspace(cli: Cli, tmp_path: Path) -> None:
    folder = write_hollow(tmp_path / "hollow", SMOLLM2)
    small, large = (answer(cli, folder, "--prefill-chunk", chunk)["fit"] for chunk in (256, 1024))
    assert large["workspace_bytes"] - small["workspace_bytes"] == 768 * 9984 * 4
    assert small["kv_budget_bytes"] > large["kv_budget_bytes"]


@pytest.mark.usefixtures("no_reads")
def test_a_mixture(cli: Cli, tmp_path: Path) -> None:
    """93 GB of a hole: nothing of it is read, and none of it is memory."""
    folder = write_hollow(tmp_path / "hollow", MIXTRAL)
    found = answer(cli, folder, "--dtype", "float16")
    assert found["parameters"] == {"total": 46_702_792_704, "active": 12_879_925_248}
    assert (found["shapes"]["experts"], found["shapes"]["experts_per_token"]) == (8, 2)
    assert found["fit"]["fits"] is False
    assert "of which a token meets 12,879,925,248" in cli("inspect", folder, "--dtype", "float16").out


def test_the_text_has_what_the_spec_asks_for(cli: Cli, tmp_path: Path) -> None:
    folder = write_hollow(tmp_path / "hollow", GEMMA3, extra={"vision.a": (3, 5), "vision.b": (7,)})
    ran = cli("inspect", folder, "--kv-cache-budget", "256M", "--ctx-size", 1000)
    said = dict(line.split(maxsplit=1) for line in ran.out.splitlines() if not line.startswith(("KV", "  ", "as")))
    assert said["family"] == "gemma3"
    assert said["shapes"] == "V 262144, D 640, H 4, K 1, d 256, F 2048, L 18"
    assert said["layers"] == "3 that see everything, 15 with a window of 512"
    assert said["parameters"] == "268,098,176"
    assert said["not"] == "used      2 tensors, 44 bytes: vision.a, vision.b"
    assert said["fits"] == "yes, with 1000 positions a row"
    for line in (
        "on disk       536196352 bytes (536.2 MB) in 236 tensors",
        "as float32    1072392704 bytes (1.1 GB)",
        "KV a token    6144 bytes (6.1 kB) as float32",
        "  in windows  30720 bytes (30.7 kB), at most 31457280 bytes (31.5 MB) a row",
        "KV budget     268435456 bytes (268.4 MB)",
    ):
        assert line in ran.out.splitlines()


def test_gguf_on_disk_and_dequantised(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", dtype="Q8_0")
    found = answer(cli, path)
    assert (found["format"], found["quantisation"], found["disk_bytes"]) == ("gguf", "Q8_0", path.stat().st_size)
    matrices = 320 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    assert found["weights"]["disk_bytes"] == matrices // 32 * 34 + 4 * 5 * 64
    assert found["weights"]["device_bytes"]["float32"] == 4 * (matrices + 5 * 64)


# --- what it refuses -----------------------------------------------------------------------------------------------


def _unknown_family(folder: Path) -> Path:
    return write_tiny_llama(folder, config_overrides={"model_type": "martian"})


def _unknown_rope(folder: Path) -> Path:
    return write_tiny_llama(folder, config_overrides={"rope_scaling": {"rope_type": "martian", "factor": 2.0}})


def _quantised(folder: Path) -> Path:
    return write_tiny_llama(folder, config_overrides={"quantization_config": {"quant_method": "gptq", "bits": 4}})


def _lacking_tensors(folder: Path) -> Path:
    return write_tiny_llama(folder, config_overrides={"num_hidden_layers": 3})


def _another_shape(folder: Path) -> Path:
    return write_tiny_llama(folder, config_overrides={"intermediate_size": 96})


def _no_tokenizer(folder: Path) -> Path:
    write_tiny_llama(folder)
    (folder / "tokenizer.json").unlink()
    return folder


def _truncated(folder: Path) -> Path:
    path = write_tiny_gguf(folder / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    return path


@pytest.mark.parametrize(
    ("make", "part", "says", "known"),
    [
        (_unknown_family, "family", "'martian'", ["format", "quantisation", "architecture", "weights"]),
        (_unknown_rope, "config", "martian", ["format", "architecture", "family", "weights"]),
        (_quantised, "format", "GPTQ", ["format"]),
        (_truncated, "format", "m.gguf", ["format"]),
        (_lacking_tensors, "tensors", "9 of 29 tensors are missing", ["family", "shapes", "parameters", "kv", "fit"]),
        (_another_shape, "tensors", "the config makes it [96, 64]", ["family", "shapes", "weights", "kv", "fit"]),
        (_no_tokenizer, "tokenizer", "no tokenizer", ["family", "shapes", "weights", "kv", "fit"]),
    ],
)
def test_what_is_unsupported_is_named_beside_what_could_be_read(
    cli: Cli, tmp_path: Path, make: Callable[[Path], Path], part: str, says: str, known: list[str]
) -> None:
    """Exit code 3 (docs/spec/clients.md 1.3), and the reason is the one that the loader gives."""
    path = make(tmp_path / "m")
    ran = cli("inspect", path, "--json")
    found = json.loads(ran.out)
    (reason,) = found["unsupported"]
    assert (ran.code, list(found), list(reason)) == (
        3,
        keys(inspection.Inspection),
        keys(inspection.Unsupported),
    )
    assert reason["part"] == part
    assert says in reason["reason"]
    assert ran.err.startswith(f"error: {reason['reason']}\nhint: ")
    assert all(found[name] is not None for name in ["name", "source", "path", "disk_bytes", *known])
    text = cli("inspect", path)
    assert text.code == 3
    assert f"unsupported   {part}: {reason['reason']}" in text.out
    assert cli("generate", path, "-p", "x").err.splitlines()[-2:] == text.err.splitlines()[-2:]


def test_every_reason_is_told(cli: Cli, tmp_path: Path) -> None:
    folder = _unknown_rope(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    found = json.loads(cli("inspect", folder, "--json").out)
    assert [reason["part"] for reason in found["unsupported"]] == ["config", "tokenizer"]


def test_a_folder_of_folders_is_not_walked(cli: Cli, tmp_path: Path) -> None:
    """A path that holds no checkpoint may hold a whole disk."""
    (tmp_path / "much" / "deeper").mkdir(parents=True)
    (tmp_path / "much" / "note.txt").write_bytes(b"12345")
    (tmp_path / "much" / "deeper" / "large").write_bytes(b"x" * 1000)
    ran = cli("inspect", tmp_path / "much", "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["disk_bytes"], found["format"], found["fit"]) == (3, 5, None, None)
    assert found["unsupported"][0]["part"] == "format"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nowhere",), 2, "no model is called 'nowhere'"),
        (("smollm2-135m-instruct",), 3, "92.9 MB to fetch, licence Apache-2.0"),
        (("tiny",), 3, "made here"),
        (("owner/name",), 3, "owner/name is not in the model store"),
        (("{tiny}", "--ctx-size", "2049"), 2, "window of 2048"),
        (("{tiny}", "--parallel", "0"), 2, "--parallel"),
        (("{tiny}", "--device-memory", "auto"), 2, "--device-memory"),
        (("{tiny}", "--device-memory", "0"), 2, "--device-memory"),
        (("{tiny}", "--backend", "none-such"), 2, "none-such"),
        (("{tiny}", "--model", "other"), 2, "differ"),
    ],
)
def test_refusals_print_nothing_on_stdout(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    """A model that is not in the store is not fetched: its size, its licence, and the command that does."""
    tiny = write_tiny_llama(tmp_path / "m")
    ran = cli("inspect", *(argument.format(tiny=tiny) for argument in arguments))
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert "hint: " in ran.err
    if code == 3:
        assert f"`mlxcel download {arguments[0]}`" in ran.err
    assert not (tmp_path / "store").exists()


def stored(store: Path, name: str, files: Mapping[str, Path]) -> StoredModel:
    folder = store / name
    folder.mkdir(parents=True)
    for file, origin in files.items():
        shutil.copy(origin, folder / file)
    model = StoredModel(
        name, folder, "origin", "MIT", "2026-01-01T00:00:00+00:00",
        tuple(StoredFile(file, (folder / file).stat().st_size, "0" * 64) for file in files),
    )  # fmt: skip
    write_record(model)
    return model


def test_a_model_of_the_store_by_name(cli: Cli, tmp_path: Path) -> None:
    """Also where a plugin could fetch it; one that is damaged is neither repaired nor fetched."""
    model = stored(tmp_path / "store", smollm2.SOURCE.name, {"m.gguf": write_tiny_gguf(tmp_path / "m.gguf")})
    found = answer(cli)
    assert (found["name"], found["source"], found["path"]) == (smollm2.SOURCE.name, "origin", str(model.path))
    model.path.write_bytes(b"GGUF")
    ran = cli("inspect")
    assert (ran.code, ran.out) == (3, "")
    assert "is damaged" in ran.err
    assert f"`mlxcel download {smollm2.SOURCE.name}`" in ran.err


def test_a_source_without_a_size_is_still_named(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    source = attrs.evolve(tiny_source("nowhere:fetch", "tiny-double"), license="Foo-1.0")
    monkeypatch.setattr(PluginManager, "model_sources", lambda manager: {source.name: source})
    ran = cli("inspect", "tiny-double")
    assert ran.code == 3
    assert "1.0 kB to fetch, licence Foo-1.0" in ran.err


# --- what the loader does ------------------------------------------------------------------------------------------


def configured(model: Path, **options: Any) -> EngineConfig:
    given = {"model": str(model), "backend": "reference-numpy", **options}
    return EngineConfig.resolve(given, environ={"MLXCEL_MODELS_DIR": str(model.parent / "store")})


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load(only=(), trace=None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("inspect") / "m")


TINY_WEIGHTS = 4 * (320 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64) + 5 * 64)
TINY_TOKEN = 2 * 2 * 32 * 4


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    asked=st.sampled_from([0, 1, 128, 200, 2048]),
    budget=st.none() | st.integers(1, 2048 * TINY_TOKEN + 4096),
    free=st.integers(TINY_WEIGHTS, TINY_WEIGHTS + 2 * 2048 * TINY_TOKEN + 2_000_000),
    slots=st.sampled_from([1, 3]),
    chunk=st.sampled_from([64, 2048]),
)
def test_the_loader_refuses_exactly_what_does_not_fit(
    tiny: Path, manager: PluginManager, asked: int, budget: int | None, free: int, slots: int, chunk: int
) -> None:
    """Spec V18 to V20: the same answer, the same context, and the same words."""
    config = configured(tiny, max_model_len=asked, kv_cache_budget=budget, prefill_chunk=chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_plan, "host_memory", lambda: HostMemory(GIB, free))
        fit = inspect_model(config, manager, NoProgress(), rows=slots)[0].fit
        assert fit is not None
        try:
            with load_model(config, manager, NoProgress(), slots=slots) as model:
                loaded: int | None = model.facts.context
                reason = None
        except MlxcelError as error:
            loaded, reason = None, error.message
    assert (fit.fits, fit.context) == (loaded is not None, loaded)
    if loaded is None:
        assert fit.reason == reason


@pytest.mark.parametrize("positions", [0, 640])
def test_the_estimate_is_what_a_load_takes(tiny: Path, manager: PluginManager, positions: int) -> None:
    """Arrays that NumPy holds once a model is loaded: weights and KV (the KV is backed on first touch, spec V6)."""
    config = configured(tiny, max_model_len=positions)
    fit = inspect_model(config, manager, NoProgress())[0].fit
    assert fit is not None
    assert measured_load(config, manager) == pytest.approx(fit.needed_bytes - fit.workspace_bytes, rel=CLOSE)


@pytest.mark.slow
def test_the_estimate_is_what_loading_the_default_model_takes(smollm2_path: Path, manager: PluginManager) -> None:
    config = configured(smollm2_path)
    fit = inspect_model(config, manager, NoProgress())[0].fit
    assert fit is not None
    assert fit.weight_bytes == 538_060_032
    assert measured_load(config, manager) == pytest.approx(fit.needed_bytes - fit.workspace_bytes, rel=CLOSE)
    assert json.loads(
        subprocess.run(
            [sys.executable, "-c", RESIDENT, str(smollm2_path)], capture_output=True, text=True, check=True
        ).stdout
    ) == pytest.approx(fit.weight_bytes, rel=CLOSE)


RESIDENT = """
import sys
from pathlib import Path
from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.load import load_model
from mlxcel.plugins.manager import PluginManager

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

config = EngineConfig.resolve({"model": sys.argv[1], "backend": "reference-numpy", "prefill_chunk": 64})
manager = PluginManager.load(only=(), trace=None)
before = resident()
with load_model(config, manager, NoProgress()):
    print(resident() - before)
"""
"""Bytes that loading adds to those of a new process that belong to no file; the KV is backed on first touch."""


def measured_load(config: EngineConfig, manager: PluginManager) -> int:
    """Bytes of NumPy's own arrays that loading adds."""
    tracemalloc.start()
    try:
        with load_model(config, manager, NoProgress()):
            taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    arrays = taken.filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    return sum(trace.size for trace in arrays.traces)


def test_a_config_of_its_own_needs_no_heads(monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path) -> None:
    """A third party's config has `vocab_size` and `context`; what it does not say is null."""
    from mlxcel.plugins.families.llama import Llama

    parse = Llama.parse_config

    @attrs.frozen
    class Own:
        inner: Any
        vocab_size: int
        context: int

    def parsed(family: Llama, checkpoint: Any) -> Own:
        inner = parse(family, checkpoint)
        return Own(inner, inner.vocab_size, inner.context)

    for name in ("schema", "kv_spec"):
        method = getattr(Llama, name)
        monkeypatch.setattr(Llama, name, lambda family, own, method=method: method(family, own.inner))
    monkeypatch.setattr(Llama, "parse_config", parsed)
    found = answer(cli, write_tiny_llama(tmp_path / "m"))
    assert {name: found["shapes"][name] for name in "VDHKdFL"} == {
        "V": 320, "D": 64, "H": None, "K": 2, "d": 16, "F": None, "L": 2,
    }  # fmt: skip
    assert found["fit"]["fits"] is True
