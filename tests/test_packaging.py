"""What is tested is the wheel: a package that a list forgets is there under `pip install -e`, and missing for users."""

from __future__ import annotations

import json
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import attrs
import pytest
from built_wheel import PACKAGES, Environment, build, commit, copy_sources, run
from packaging.requirements import Requirement
from tiny_checkpoint import write_tiny_llama

BASE = {
    "numpy", "attrs", "pluggy", "click", "rich", "tokenizers", "huggingface-hub", "safetensors", "jinja2", "msgspec",
    "starlette", "hypercorn", "prometheus-client", "prompt-toolkit",
}  # fmt: skip
"""docs/design.md 3. JAX is an extra: the NumPy backend needs none of it."""


@attrs.frozen
class Built:
    """A wheel, the folder it was built from, and that folder's commit."""

    wheel: Path
    source: Path
    commit: str

    def names(self) -> list[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def read(self, name: str) -> str:
        """The text of a member; "*" in front stands for the metadata folder."""
        with zipfile.ZipFile(self.wheel) as archive:
            [found] = [member for member in archive.namelist() if member.endswith(name.removeprefix("*"))]
            return archive.read(found).decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    source = copy_sources(folder / "source")
    head = commit(source)
    [wheel] = build(source, folder / "out", "--wheel")
    return Built(wheel, source, head)


@pytest.fixture(scope="module")
def clean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.with_wheel(tmp_path_factory.mktemp("clean"), built.wheel)


def expected_files() -> set[str]:
    """Every file of the three source folders, under the name it is imported by."""
    return {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# --- the wheel --------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_every_file_and_no_other(built: Built) -> None:
    held = {name for name in built.names() if ".dist-info/" not in name}
    assert held == expected_files() | {"mlxcel/_build.py"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= held


def test_base_requirements_are_those_of_the_design(built: Built) -> None:
    fields = Parser().parsestr(built.read("*.dist-info/METADATA"))
    requirements = [Requirement(text) for text in fields.get_all("Requires-Dist") or []]
    assert {one.name for one in requirements if one.marker is None} == BASE
    assert set(fields.get_all("Provides-Extra") or []) == {"jax", "cuda12", "cuda13", "structured", "dev"}
    extras = {str(one) for one in requirements if one.marker is not None}
    assert any(text.startswith("jax[cuda12]") for text in extras)
    assert any(text.startswith("jax[cuda13]") for text in extras)
    assert not any(text.startswith("jaxlib") for text in extras), "jaxlib has no extras"
    assert fields["Requires-Python"] == ">=3.11"


def test_entry_points(built: Built) -> None:
    parser = ConfigParser()
    parser.read_string(built.read("*.dist-info/entry_points.txt"))
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "console_scripts": {"mlxcel": "mlxcel.cli.start:main"},
        "mlxcel": {
            "mlxcel-builtin": "mlxcel.plugins.builtin",
            "jax-cuda": "mlxcel_jax_cuda.plugin",
            "reference-numpy": "mlxcel_reference_numpy.plugin",
        },
    }


# --- the commit of a build --------------------------------------------------------------------------------------------


def test_a_build_is_stamped_and_the_tree_stays_clean(built: Built) -> None:
    assert built.read("mlxcel/_build.py").endswith(f'COMMIT = "{built.commit}"\n')
    assert run("git", "status", "--porcelain", cwd=built.source).stdout == ""
    assert not (built.source / "mlxcel" / "_build.py").exists()


def test_an_sdist_keeps_its_stamp_inside_another_repository(built: Built, tmp_path: Path) -> None:
    [sdist] = build(built.source, tmp_path / "sdist", "--sdist")
    run("tar", "xzf", sdist, "-C", tmp_path, cwd=tmp_path)
    assert commit(tmp_path) != built.commit
    [source] = tmp_path.glob("mlxcel-*")
    [wheel] = build(source, tmp_path / "wheel", "--wheel")
    assert attrs.evolve(built, wheel=wheel).read("mlxcel/_build.py") == built.read("mlxcel/_build.py")
    assert sorted(attrs.evolve(built, wheel=wheel).names()) == sorted(built.names())


def test_a_build_says_when_files_differ_from_the_commit_and_nothing_without_one(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    [plain] = build(source, tmp_path / "plain", "--wheel")
    assert "mlxcel/_build.py" not in Built(plain, source, "").names()
    head = commit(source)
    (source / "README.md").write_text("changed\n")
    [changed] = build(source, tmp_path / "changed", "--wheel")
    assert f'"{head}+changes"' in Built(changed, source, head).read("mlxcel/_build.py")


# --- installed where nothing else is ----------------------------------------------------------------------------------


def test_everything_is_imported_from_the_wheel(clean: Environment) -> None:
    code = (
        "import importlib, json, sys\n"
        f"places = [importlib.import_module(name).__file__ for name in {sorted(PACKAGES)!r}]\n"
        "print(json.dumps([places, [name for name in ('jax', 'pytest', 'gguf') if importlib.util.find_spec(name)]]))"
    )
    places, strangers = json.loads(clean.run("-c", f"import importlib.util\n{code}").stdout)
    assert places == [str(clean.site / package / "__init__.py") for package in sorted(PACKAGES)]
    assert strangers == []


def test_version(clean: Environment, built: Built) -> None:
    said = clean.mlxcel("--version").stdout
    assert said == clean.run("-m", "mlxcel", "--version").stdout
    assert f"mlxcel {metadata.version('mlxcel')} " in said
    assert built.commit in said


def test_plugins(clean: Environment) -> None:
    shown = json.loads(clean.mlxcel("plugins", "--json", "--strict").stdout)
    assert [plugin["entry_point"] for plugin in shown["plugins"]] == ["jax-cuda", "mlxcel-builtin", "reference-numpy"]
    assert {plugin["distribution"] for plugin in shown["plugins"]} == {"mlxcel"}


def test_generate_runs_the_toy_family(clean: Environment, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "toy", config_overrides={"model_type": "mlxcel-tiny"})
    asked = ("generate", str(model), "-p", "hello", "-n", "4", "--json")
    shown = json.loads(clean.mlxcel(*asked).stdout)
    assert shown["backend"] == "reference-numpy"
    assert shown["details"]["model"]["family"] == "tiny"
    assert len(shown["token_ids"]) == 4 or shown["finish_cause"] == "eos"
    assert shown["token_ids"] == json.loads(clean.mlxcel(*asked).stdout)["token_ids"]


def test_h_q7_a_backend_asked_for_by_name_never_falls_back(clean: Environment, tmp_path: Path) -> None:
    """clients 0.2: exit 3 with what is missing, whatever the machine."""
    model = write_tiny_llama(tmp_path / "toy")
    done = clean.mlxcel("generate", str(model), "-p", "hello", "--backend", "jax-cuda", "--device", "cuda", check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: the backend jax-cuda cannot run here: it needs jax")
    assert hint.startswith("hint: on NVIDIA GPUs: pip install 'mlxcel[cuda13]'")
