"""Engine options from four places: an explicit value, else a variable, else the configuration file, else the default.

The only place that touches the environment (docs/spec/clients.md 0.1). Whatever cannot be obeyed is an error that names
its place; an empty variable counts as not set, MLXCEL_PLUGINS apart, where it means that no third party's plugin loads.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from mlxcel.core.param_records import LoopDetection
from mlxcel.errors import UsageError
from mlxcel.options import BY_NAME, OPTIONS, Option
from mlxcel.store.root import cache_root, state_root, store_root

Origin = Literal["flag", "environment", "config", "default"]

CONFIG_VARIABLE: Final = "MLXCEL_CONFIG"
API_KEY_VARIABLE: Final = "MLXCEL_API_KEY"
OPENAI_KEY_VARIABLE: Final = "OPENAI_API_KEY"
COMPLETION_VARIABLE: Final = "_MLXCEL_COMPLETE"
STORE_VARIABLES: Final = ("MLXCEL_MODELS_DIR", "MLXCEL_CACHE_DIR", "XDG_CACHE_HOME")
STATE_VARIABLE: Final = "XDG_STATE_HOME"
XLA_VARIABLE: Final = "XLA_FLAGS"
COMPILING: Final = ("XLA_", "JAX_", "TF_", "CUDA_", "NVIDIA_", "MOSAIC_", "TRITON_", "LIBTPU_")
NOT_COMPILING: Final = (
    "XLA_PYTHON_CLIENT_",
    "XLA_CLIENT_",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "TF_CPP_",
    "JAX_COMPILATION_CACHE",
)
"""Of these: how much memory a process takes, which of several devices it sees, what it tells, where it keeps things."""
ROWS: Final = "max_num_seqs"
_MAX_FILE: Final = 1 << 20  # bytes of a configuration file


@attrs.frozen
class EngineConfig:
    """Effective options; the table in mlxcel/options.py says what each means. `origins` has one entry a field of it.

    `max_model_len` 0 and None of `kv_cache_budget`, `max_num_seqs`, `page_size` and `enable_prefix_caching` leave the
    choice to the loader, None of `adaptive_prefill_chunk` and `mixed_step` to the level in force. `cache_root` is the
    folder for what can be made again, `state_root` the one for what a user would miss, such as the history of `run`;
    each None where this user has no place for one.
    """

    backend: str | None
    device: str
    deterministic: bool
    offline: bool
    no_color: bool
    model: str
    max_model_len: int
    dtype: str
    kv_storage: str
    kv_cache_budget: int | None
    gpu_memory_utilization: float
    prefill_chunk: int
    prefill_planner: str
    sampler: str
    loop_detection: LoopDetection
    chat_template: str | None
    chat_template_file: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    generation_config: str
    served_model_name: tuple[str, ...]
    max_consecutive_faults: int
    debug_numerics: bool
    force_sync: bool
    max_num_seqs: int | None
    decode_timeout: float
    prefill_grant_interval: int
    adaptive_prefill_chunk: bool | None
    prefill_chunk_busy: int
    mixed_step: bool | None
    max_batch_prefill_tokens: int
    no_preemption: bool
    no_warmup: bool
    kv_admission_watermark: float
    priority_ageing_seconds: float
    page_size: int | None
    enable_prefix_caching: bool | None
    prompt_cache_capacity_bytes: int | None
    prompt_cache_max_entries: int
    prompt_cache_ttl: float
    prompt_cache_min_prefix: int
    prompt_cache_file: str | None
    max_n: int
    max_logprobs: int
    print_token_ids: bool
    trace_hooks: bool
    plugins: str | None
    store_root: Path
    cache_root: Path | None
    state_root: Path | None
    origins: Mapping[str, Origin]

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any] | None = None,
        *,
        config_file: str | None = None,
        environ: Mapping[str, str] | None = None,
        scheduler: bool = True,
        one_row: bool = False,
    ) -> EngineConfig:
        """`given` holds explicit values by keyword, None being none. UsageError for what cannot be obeyed. A client
        without a `scheduler` does not read the variables of that group; one that has `one_row` always, whatever a
        variable or a file says, does not read the number of rows."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {option.name: option.default for option in OPTIONS}
        origins: dict[str, Origin] = {option.name: "default" for option in OPTIONS}
        layers: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
            ("config", _from_file(config_file or environ.get(CONFIG_VARIABLE))),
            ("environment", _from_environment(environ, scheduler, one_row)),
            ("flag", _from_keywords(given or {})),
        )
        for origin, layer in layers:
            values.update(layer)
            origins.update(dict.fromkeys(layer, origin))
        if one_row:
            values[ROWS], origins[ROWS] = 1, "default"
        _require_one_template(values, origins)
        models, cache, xdg = (environ.get(name) for name in STORE_VARIABLES)
        root = store_root(models, cache, xdg, lambda: _home(environ))
        kept = _if_there_is_one(lambda: cache_root(cache, xdg, lambda: _home(environ)))
        state = _if_there_is_one(lambda: state_root(environ.get(STATE_VARIABLE), lambda: _home(environ)))
        return cls(**values, store_root=root, cache_root=kept, state_root=state, origins=origins)


def completion_request(environ: Mapping[str, str] | None = None) -> str | None:
    """What a shell's completion script asks for, None in ordinary runs."""
    return (os.environ if environ is None else environ).get(COMPLETION_VARIABLE)


def api_key_variable(environ: Mapping[str, str] | None = None) -> str | None:
    """A server's key, beside those of its flags; None where there is none."""
    return (os.environ if environ is None else environ).get(API_KEY_VARIABLE) or None


def variables_in_force(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """For records of measurements: our variables that are set, and XLA's flags. Keys are not among them."""
    environ = os.environ if environ is None else environ
    names = sorted(name for name in environ if name.startswith("MLXCEL_") or name == XLA_VARIABLE)
    return {name: environ[name] for name in names if not name.endswith("_KEY")}


def compiling_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those by which JAX, XLA, and what they call, may come to another program."""
    environ = os.environ if environ is None else environ
    names = sorted(name for name in environ if name.startswith(COMPILING) and not name.startswith(NOT_COMPILING))
    return {name: environ[name] for name in names}


def openai_key_variable(environ: Mapping[str, str] | None = None) -> str | None:
    """The key that OpenAI's clients send to whatever server they are pointed at; None where there is none."""
    return (os.environ if environ is None else environ).get(OPENAI_KEY_VARIABLE) or None


def set_variables(values: Mapping[str, str | None], *, unless_set: Mapping[str, str]) -> None:
    """Variables for a library that reads them when it is imported: `values` in any case, None removing one, and those
    of `unless_set` where there is none yet."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name, value in unless_set.items():
        os.environ.setdefault(name, value)


def plugin_limit(text: str | None) -> tuple[str, ...] | None:
    """Distributions that a value of MLXCEL_PLUGINS names; None where it is not set."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def plugin_limit_in_force(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """The limit alone, for --help, which must work whatever the other variables hold."""
    return plugin_limit((os.environ if environ is None else environ).get("MLXCEL_PLUGINS"))


def _home(environ: Mapping[str, str]) -> Path:
    named = environ.get("HOME") or environ.get("USERPROFILE")
    try:
        return Path(named) if named else Path.home()
    except RuntimeError as error:  # a user without a password entry, as containers have them
        raise UsageError(
            "this user has no home folder and HOME is not set, so that there is no place for models",
            hint="set MLXCEL_CACHE_DIR to a folder",
        ) from error


def _from_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in given.items():
        option = BY_NAME.get(name)
        if option is None:
            raise UsageError(f"{name!r} is no option", hint=_nearest(name, sorted(BY_NAME)))
        if value is not None:
            values[name] = _checked(option, value, name)
    return values


def _if_there_is_one(find: Callable[[], Path]) -> Path | None:
    try:
        return find()
    except UsageError:
        return None


def _from_environment(environ: Mapping[str, str], scheduler: bool, one_row: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if (option.group == "scheduler" and not scheduler) or (option.name == ROWS and one_row):
            continue
        text = environ.get(option.env) if option.env else None
        if text is None or (text == "" and option.name != "plugins"):
            continue
        if option.env == "NO_COLOR":  # any value means yes: https://no-color.org
            values[option.name] = True
            continue
        try:
            values[option.name] = option.kind.from_text(text)
        except ValueError:
            raise UsageError(
                f"the environment variable {option.env} is {text!r}, it must be {option.kind.words}",
                hint=f"correct it, or remove it with `unset {option.env}`",
            ) from None
    return values


def _from_file(file: str | None) -> dict[str, Any]:
    if not file:
        return {}
    known = {key: option for option in OPTIONS if option.in_file for key in option.keys}
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in _read_toml(file).items():
        option = known.get(key)
        if option is None:
            raise UsageError(f"{file}: {key!r} is no option", hint=_nearest(key, sorted(known)))
        if option.name in spelled:
            raise UsageError(
                f"{file}: {spelled[option.name]!r} and {key!r} are one option", hint="leave one of them out"
            )
        spelled[option.name] = key
        values[option.name] = _checked(option, value, f"{file}: {key}")
    return values


def _read_toml(file: str) -> dict[str, Any]:
    hint = "--config takes a TOML file with one `name = value` a line"
    try:
        with open(file, "rb") as stream:
            data = stream.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise UsageError(f"{file} has more than {_MAX_FILE} bytes", hint=hint)
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise UsageError(
            f"the configuration file {file} cannot be read: {error.strerror or error}",
            hint="check --config and MLXCEL_CONFIG",
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}", hint=hint) from error


def _checked(option: Option, value: Any, place: str) -> Any:
    try:
        return option.kind.from_data(value)
    except ValueError:
        raise UsageError(f"{place} is {value!r}, it must be {option.kind.words}") from None


def _require_one_template(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> None:
    pair = ("chat_template", "chat_template_file")
    if all(values[name] is not None for name in pair):
        flags = " and ".join(f"{BY_NAME[name].flags[0]} ({origins[name]})" for name in pair)
        raise UsageError(f"{flags} are both given", hint="leave one of them out")


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
