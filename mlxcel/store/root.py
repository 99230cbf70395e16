"""Which folder is the store, which one holds what can be made again, and which one what a user would miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def store_root(
    models_dir: str | None, cache_dir: str | None, xdg_cache_home: str | None, home: Callable[[], Path]
) -> Path:
    """The first of MLXCEL_MODELS_DIR, MLXCEL_CACHE_DIR/models, XDG_CACHE_HOME/mlxcel/models, ~/.cache/mlxcel/models.

    The values are the variables'. An empty one counts as unset, and so does a relative XDG_CACHE_HOME, as the XDG base
    directory specification asks. `home` is asked only where they do not decide: not every user has one.
    """
    if models_dir:
        return Path(models_dir).absolute()
    return cache_root(cache_dir, xdg_cache_home, home) / "models"


def cache_root(cache_dir: str | None, xdg_cache_home: str | None, home: Callable[[], Path]) -> Path:
    """The first of MLXCEL_CACHE_DIR, XDG_CACHE_HOME/mlxcel, ~/.cache/mlxcel, by the same rules."""
    if cache_dir:
        return Path(cache_dir).absolute()
    if xdg_cache_home and Path(xdg_cache_home).is_absolute():
        return Path(xdg_cache_home) / "mlxcel"
    return home() / ".cache" / "mlxcel"


def state_root(xdg_state_home: str | None, home: Callable[[], Path]) -> Path:
    """The first of XDG_STATE_HOME/mlxcel, ~/.local/state/mlxcel, by the same rules."""
    if xdg_state_home and Path(xdg_state_home).is_absolute():
        return Path(xdg_state_home) / "mlxcel"
    return home() / ".local" / "state" / "mlxcel"
