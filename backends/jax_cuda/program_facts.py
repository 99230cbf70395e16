"""What tracing and compiling go by beside the function and its static arguments: what makes a program, what it is made
for, what JAX was told, and the kinds of its arrays."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
from jaxlib.version import __version__ as jaxlib_version

from mlxcel.config import compiling_variables
from mlxcel_jax_cuda import driver
from mlxcel_jax_cuda.package_files import Unknown
from mlxcel_jax_cuda.sources import own_digest, versions

_OPTIMISED: Final = sys.flags.optimize
_OF_CACHES: Final = ("compilation_cache", "persistent_cache")


def facts_of(device: jax.Device) -> list[Any]:
    """Beside its arguments: what makes a program, and what it is made for."""
    client: Any = device.client
    python = [*platform.python_version_tuple(), _OPTIMISED]
    made_by = [jax.__version__, jaxlib_version, *versions(), *python, own_digest(), _options()]
    facts = [
        device.platform,
        device.device_kind,
        device.id,
        client.platform_version,
        str(getattr(device, "compute_capability", "")),
        int(getattr(device, "core_count", 0)),
    ]
    if device.platform == "cpu":
        return [made_by, facts, _processor()]
    return [made_by, facts, driver.cuda_version(), driver.driver_version()]


def _processor() -> list[str]:
    """XLA:CPU compiles for the very processor: its name and what it can do, of the first core."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        first = []
    told = ("model", "flags", "vendor", "cpu family", "stepping", "Features", "CPU")
    return [platform.machine(), str(os.cpu_count()), *(line for line in first if line.startswith(told))]


def _options() -> bytes:
    """What XLA is told where nobody says otherwise, as it has read that: once in a process, from a variable or from the
    file that the variable names. Unknown in a version without the calls for it."""
    try:
        from jaxlib.xla_client import CompileOptions

        options = CompileOptions()
        _ = options.executable_build_options.debug_options  # is read here
        return bytes(options.SerializeAsString())
    except (ImportError, AttributeError) as error:
        raise Unknown(f"this version of JAX does not say what XLA was told: {error}") from error


def settings() -> dict[str, Any]:
    """What JAX and XLA were told, on this thread too, but for where they keep things."""
    from jax._src.config import trace_context

    told = {name: value for name, value in jax.config.values.items() if not any(word in name for word in _OF_CACHES)}
    # Meshes, metadata and places that a `with` gives. The one object without words is the names of axes, inside vmap.
    around = [words for words in map(repr, trace_context()) if " at 0x" not in words]
    return {"config": repr(sorted(told.items())), "around": around, "variables": compiling_variables()}


def kinds(arrays: tuple[Any, ...]) -> Iterator[Any]:
    """Of each array all by which a compiled program takes it or not."""
    leaves, tree = jax.tree.flatten(arrays)
    yield str(tree)
    for leaf in leaves:
        sharding = str(leaf.sharding) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
        yield leaf.dtype.name, leaf.shape, bool(getattr(leaf, "weak_type", False)), sharding
