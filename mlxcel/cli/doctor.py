"""`mlxcel doctor`: what works here, and what to do about what does not."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import attrs
import click

from mlxcel.cli.commands import NAMES
from mlxcel.errors import MlxcelError
from mlxcel.options import BY_NAME

if TYPE_CHECKING:
    from mlxcel.cli.context import CliContext
    from mlxcel.config import EngineConfig
    from mlxcel.plugins.manager import PluginManager

Status = Literal["ok", "absent", "warning", "failed"]

PACKAGES: Final = ("mlxcel", "numpy", "click", "pluggy", "tokenizers", "safetensors", "jinja2")
OPTIONAL: Final = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin")
TRIED_ON_A_GPU: Final = ("0.11.2",)
"""Versions of jax whose kernels ran on a GPU with this version. Others may compile them otherwise, or not at all."""
_NVIDIA: Final = Path("/proc/driver/nvidia/version")


@attrs.frozen
class Check:
    """One finding. `failed` is for what is needed, `absent` for what could be there and need not; `hint` is the next
    step."""

    name: str
    status: Status
    detail: str
    hint: str | None = None


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
@click.pass_obj
def command(context: CliContext, /, *, as_json: bool) -> int:
    """Check this installation: versions, backends, plugins, the model store, and a generation of two tokens."""
    checks: list[Check] = []
    for check in run_checks(context.config, context.plugins()):
        checks.append(check)
        if not as_json:
            click.echo(f"{check.status:8} {check.name}: {check.detail}")
            if check.hint:
                click.echo(f"{'':8} hint: {check.hint}")
    if as_json:
        click.echo(json.dumps([attrs.asdict(check) for check in checks], indent=2))
    return 3 if any(check.status == "failed" for check in checks) else 0


def run_checks(config: EngineConfig, manager: PluginManager) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield _packages()
    yield from _gpu()
    share = BY_NAME["gpu_memory_utilization"]
    yield Check("memory of a GPU", "ok", f"{getattr(config, share.name):g} of it ({config.origins[share.name]})")
    yield from _backends(config, manager)
    yield from _plugins(manager)
    yield _store(config.store_root)
    yield _default_model(config, manager)


def _packages() -> Check:
    found = {name: _version(name) for name in (*PACKAGES, *OPTIONAL)}
    lacking = [name for name in PACKAGES if found[name] is None]
    words = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    if lacking:
        return Check("packages", "failed", words, f"pip install {' '.join(lacking)}")
    return Check("packages", "ok", words)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> Iterator[Check]:
    """A GPU that nothing can use is worth a word; no GPU is not."""
    try:
        driver = _NVIDIA.read_text().splitlines()[0]
    except (OSError, IndexError):
        return
    plugins = [name for name in ("jax_cuda13_plugin", "jax_cuda12_plugin") if find_spec(name)]
    jax = _version("jax")
    if plugins and jax in TRIED_ON_A_GPU:
        yield Check("gpu", "ok", f"{driver}; jax {jax} with {', '.join(plugins)}")
    elif plugins:
        tried = ", ".join(TRIED_ON_A_GPU)
        yield Check(
            "gpu", "warning", f"{driver}; jax {jax} with {', '.join(plugins)} was not tried on a GPU (tried: {tried})",
            f"if something fails: pip install jax=={TRIED_ON_A_GPU[-1]} and its plugin of the same version",
        )  # fmt: skip
    else:
        yield Check(
            "gpu", "warning", f"{driver}; jax for CUDA is not installed",
            "pip install 'mlxcel[cuda13]', or 'mlxcel[cuda12]' for an older driver",
        )  # fmt: skip


def _backends(config: EngineConfig, manager: PluginManager) -> Iterator[Check]:
    from mlxcel.choose_backend import probed

    available = []
    try:
        specs = list(manager.backends().values())
    except MlxcelError as error:
        yield Check("backends", "failed", error.message, error.hint)
        return
    for spec in sorted(specs, key=lambda spec: -spec.priority):
        probe = probed(spec, config.device)
        words = f"{'available' if probe.available else 'not available'}: {probe.reason}"
        devices = f" ({', '.join(probe.devices)})" if probe.devices else ""
        yield Check(f"backend {spec.name}", "ok" if probe.available else "absent", f"{words}{devices}", probe.hint)
        if probe.available:
            available.append(spec)
    if not available:
        yield Check("backends", "failed", "none can run here", "pip install --force-reinstall mlxcel")
    for spec in available:
        yield _two_tokens(config, manager, spec.name)
        if spec.prepare_target is not None:
            yield _backend_cache(config, spec.name)


def _two_tokens(config: EngineConfig, manager: PluginManager, backend: str) -> Check:
    from mlxcel.choose_backend import backend_cache
    from mlxcel.core.backend import BackendSettings
    from mlxcel.self_test import TOKENS, two_tokens

    name = f"generation on {backend}"
    hint = "run again with -vv generate for the trace"
    # No share of the memory is taken at once: a server may be running on the device.
    settings = BackendSettings(config.device, None, backend_cache(config, backend))
    try:
        result, caps = two_tokens(manager, backend, settings)
    except Exception as error:
        return Check(name, "failed", f"{type(error).__name__}: {error}", hint)
    if result.error is not None or len(result.token_ids) != TOKENS:
        return Check(
            name, "failed", f"{len(result.token_ids)} of {TOKENS} tokens: {result.error or result.cause}", hint
        )
    ids = ", ".join(map(str, result.token_ids))
    return Check(
        name, "ok", f"{TOKENS} tokens of the toy model on {caps.platform} ({caps.device}), {caps.dtype}: {ids}"
    )


def _backend_cache(config: EngineConfig, backend: str) -> Check:
    """What a backend keeps between runs, such as compiled programs."""
    from mlxcel.choose_backend import backend_cache

    name, root = f"cache of {backend}", backend_cache(config, backend)
    if root is None:
        return Check(name, "warning", "there is no folder for one", "set HOME, or MLXCEL_CACHE_DIR to a folder")
    check = _folder(name, root, "set MLXCEL_CACHE_DIR to a folder that you may write to")
    if check.status != "ok":
        return check
    sizes = [file.stat().st_size for file in root.rglob("*") if file.is_file()]
    return attrs.evolve(check, detail=f"{check.detail}, {len(sizes)} files of {sum(sizes) / 1e6:.1f} MB")


def _plugins(manager: PluginManager) -> Iterator[Check]:
    infos = manager.infos()
    failed = [f"{info.entry_point} of {info.distribution}: {info.error}" for info in infos if info.error]
    wrong = [*failed, *manager.clashes(built_in_commands=NAMES)]
    if wrong:
        yield Check(
            "plugins", "warning", "; ".join(wrong), "`mlxcel plugins` shows all; MLXCEL_PLUGINS leaves some out"
        )
    else:
        yield Check("plugins", "ok", f"{len(infos)} loaded")


def _store(root: Path) -> Check:
    return _folder("model store", root, "set MLXCEL_MODELS_DIR to a folder that you may write to")


def _folder(name: str, root: Path, hint: str) -> Check:
    """Where it would be made, when it is not there yet."""
    try:
        place = next(folder for folder in (root, *root.parents) if folder.exists())  # raises where one may not look
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        return Check(name, "warning", f"{root} cannot be written to: {error.strerror or error}", hint)
    made = "" if place == root else " (not made yet)"
    return Check(name, "ok", f"{root}{made}, {free / 1e9:.1f} GB free")


def _default_model(config: EngineConfig, manager: PluginManager) -> Check:
    from mlxcel.options import DEFAULT_MODEL
    from mlxcel.store import ModelStore

    name = f"default model {DEFAULT_MODEL}"
    stored = ModelStore(config.store_root).get(DEFAULT_MODEL)
    if stored is not None:
        damage = stored.damage()
        if damage is None:
            return Check(name, "ok", str(stored.path))
        return Check(name, "warning", damage, f"mlxcel download {DEFAULT_MODEL}")
    source = manager.model_sources().get(DEFAULT_MODEL)
    if source is None:
        return Check(name, "warning", "no plugin registers it", "name a model of your own with -m PATH")
    if config.offline:
        return Check(name, "warning", "not in the store, and offline", "mlxcel download without --offline")
    if find_spec("pip") is None:
        return Check(
            name, "warning", "not in the store, and this Python has no pip to fetch it with",
            "`uv pip install pip`, or `python -m ensurepip`",
        )  # fmt: skip
    return Check(name, "ok", f"not in the store yet; `mlxcel download` fetches {source.bytes / 1e6:.1f} MB")
