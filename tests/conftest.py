"""Fixtures that more than one test file needs."""

from __future__ import annotations

import gc
import os
import site
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from plugin_doubles import Installer
from source_doubles import make_wheel
from tested_backends import BACKENDS, REFERENCE, running_on

# A change must pass or fail by itself: on a busy machine too, and in CI the drawn examples are the same in every run,
# elsewhere they are new ones.
UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("unhurried", **UNHURRIED)
settings.register_profile("ci", derandomize=True, **UNHURRIED)
settings.load_profile("ci" if os.environ.get("CI") else "unhurried")


COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a run share what JAX compiled, in a folder that is made before they start and goes with them."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="mlxcel-tests-jax-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ |= {**COMPILED, "JAX_COMPILATION_CACHE_DIR": folder.name}
    config.addinivalue_line("markers", "on_jax(most): so many of its cases on JAX in make test, the others are slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each case on JAX compiles programs of its own: `on_jax` spreads a few over all of a test's cases."""
    cases: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        case = getattr(item, "callspec", None)  # of a test that is parametrised
        if case is None or not isinstance(item, pytest.Function) or item.get_closest_marker("on_jax") is None:
            continue
        if case.params.get("backend", case.params.get("xp")) not in (None, REFERENCE, "numpy"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("on_jax")
        most = marker.kwargs["most"] if marker else len(found)
        kept = {(2 * place + 1) * len(found) // (2 * most) for place in range(most)}
        for place, item in enumerate(found):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Tests that ask for it, and what they are made from, run on each backend in turn."""
    with running_on(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _backend_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Beside tests that run on each backend there are others, which are about the reference."""
    with running_on(request.getfixturevalue("backend") if "backend" in request.fixturenames else REFERENCE):
        yield


@pytest.fixture(scope="module", autouse=True)
def _older_than_the_file() -> None:
    """What is there before a file's tests lives to the end of the run: thousands of tests, and all that was traced and
    compiled. Each `gc.collect()` looked through it, and tools that collect around every run took seconds instead of
    tenths."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file; `make test` fetches it into the store and names it in MLXCEL_TEST_MODEL."""
    return _named_file("MLXCEL_TEST_MODEL", "make test")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """gemma3-270m's GGUF file, by `make test-slow` and MLXCEL_TEST_GEMMA3."""
    return _named_file("MLXCEL_TEST_GEMMA3", "make test-slow")


def _named_file(variable: str, command: str) -> Path:
    named = os.environ.get(variable)
    if not named:
        pytest.skip(f"{variable} does not name the model's GGUF file; `{command}` sets it")
    path = Path(named)
    if not path.is_file():
        pytest.fail(f"{variable} names {path}, which is no file")
    return path


@pytest.fixture(autouse=True)
def _own_plugins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other distributions' plugins that happen to be installed beside the tests are not part of them."""
    installed = metadata.entry_points
    beside = {Path(folder).resolve() for folder in site.getsitepackages()}

    def ours(**selection: str) -> list[metadata.EntryPoint]:
        return [
            entry
            for entry in installed(**selection)
            if entry.dist is None
            or entry.dist.name == "mlxcel"
            or Path(str(entry.dist.locate_file(""))).resolve() not in beside
        ]

    monkeypatch.setattr("mlxcel.plugins.discovery.metadata.entry_points", ours)


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """An empty place for distributions; what was imported from it is forgotten after the test."""
    before = set(sys.modules)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Installer(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The empty folder that a model source fetches into."""
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The small wheel of a model, for a pip that is a double."""
    return make_wheel(tmp_path / "pip")


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real pip with a folder of wheels as its only index, and its own temporary and cache folders."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    house = tmp_path / "wheelhouse"
    house.mkdir()
    for folder in ("tmp", "cache"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(house))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    return house


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for the chat page. The test is skipped where there is none."""
    from page_browser import launched

    with launched() as browser:
        yield browser


@pytest.fixture
def page_server() -> Iterator[Any]:
    """A server of the chat page whose answers the test writes."""
    from page_server import PageServer

    server = PageServer().start()
    yield server
    server.stop()


@pytest.fixture
def visits(chromium: Any) -> Iterator[Callable[..., Any]]:
    """See `page_browser.visited`."""
    from page_browser import visited

    with visited(chromium) as visit:
        yield visit
