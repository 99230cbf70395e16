"""Where a prompt cache file may lie (docs/spec/engine.md 8.1): links, pipes, folders, names that cannot be."""

import os
import stat

import pytest
from cache_rows import caching, ids_of
from tiny_checkpoint import write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.source import NoProgress
from mlxcel.errors import CacheFileError
from mlxcel.load import load_model
from mlxcel.plugins.kv.cache_file import read_cache_file
from mlxcel.plugins.manager import PluginManager


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path):
    """A pipe, which would be waited for, and a folder."""
    made, pipe = caching(), tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(CacheFileError, match="it is no file"):
            made.cache.load(made.engine, path)
        with pytest.raises(CacheFileError, match="what is there is no file"):
            made.cache.save(made.engine, path)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_one(tmp_path):
    made, link = caching(), tmp_path / "link"
    link.symlink_to(tmp_path / "kept")
    made.run(ids_of(40))
    for _ in range(2):
        made.cache.save(made.engine, link)
    assert link.is_symlink()
    assert len(read_cache_file(tmp_path / "kept")) == 1


def test_a_name_that_no_file_can_have_is_a_warning_at_the_end(tmp_path, caplog):
    """Spec 8.1: never a start that fails."""
    options = {
        "model": str(write_tiny_llama(tmp_path / "tiny")),
        "backend": "reference-numpy",
        "prompt_cache_file": str(tmp_path / ("x" * 300)),
    }
    config = EngineConfig.resolve(options, environ={})
    with load_model(config, PluginManager.load(only=(), trace=None), NoProgress(), scheduled=True):
        assert not caplog.records
    assert [record.levelname for record in caplog.records] == ["WARNING"]
