"""The example distribution as a user would have it: a wheel, installed in an environment of its own."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import tiny_tokenizer_json, write_json

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "mlxcel-family-example"
sys.path.insert(0, str(EXAMPLE / "tests"))  # its writer is part of its tests, which the wheel does not hold

from neox_checkpoint import neox_config, neox_logits, neox_weights, write_neox  # noqa: E402


def run(*command: str | Path | int, cwd: Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """A program without the settings of this process; its output. Fails when it fails, unless told otherwise."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MLXCEL_", "PYTHON"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done


def environment(folder: Path) -> Path:
    """A new environment that sees mlxcel and what it needs, by a .pth file; its Python. It has no pip."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    # addsitedir, and not plain paths: an editable installation of mlxcel is a .pth file of its own.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (Path(packages) / "of_the_tests.pth").write_text("".join(lines))
    return python


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the example's wheel in it."""
    folder = tmp_path_factory.mktemp("example")
    source = folder / "source"
    # Not in place: a build leaves folders beside pyproject.toml.
    for path in sorted(EXAMPLE.rglob("*")):
        if path.is_file() and path.suffix in (".py", ".toml", ".md"):
            copy = source / path.relative_to(EXAMPLE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("mlxcel_family_example-*.whl")
    made = environment(folder / "env")
    run(*pip, "--python", made, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_neox(tmp_path_factory.mktemp("models") / "tiny-neox")
    write_json(folder / "tokenizer.json", tiny_tokenizer_json(300))
    return folder


GENERATE = ("-m", "mlxcel", "generate", "--backend", "reference-numpy", "-n", "8")
PROMPT = [40, 41, 299, 42, 7]


@pytest.mark.parametrize("chunk", [2, 2048])
def test_an_installed_family_generates_what_the_formulas_say(
    python: Path, model: Path, tmp_path: Path, chunk: int
) -> None:
    """Greedy ids against the plain forward; no step of this seeded model is within float32 of a tie."""
    ids = ",".join(map(str, PROMPT))
    done = run(python, *GENERATE, "--json", "--token-ids", ids, "--prefill-chunk", chunk, model, cwd=tmp_path)
    config = neox_config()
    row = list(PROMPT)
    for _ in range(8):
        logits = neox_logits(config, neox_weights(config), np.array(row))[-1]
        row.append(int(np.argmax(logits[:300])))  # ids 300 to 319 are padding: the tokenizer has 300
    assert json.loads(done.stdout)["token_ids"] == row[len(PROMPT) :]


def test_the_plugin_is_listed_with_its_distribution(python: Path, tmp_path: Path) -> None:
    listed = run(python, "-m", "mlxcel", "plugins", cwd=tmp_path).stdout
    assert "mlxcel-family-example" in listed
    assert "gpt-neox" in listed


def test_registering_it_imports_nothing_heavy(python: Path, tmp_path: Path) -> None:
    probe = (
        "import sys, mlxcel_family_example.plugin as p; assert p.mlxcel_families()[0].model_types == ('gpt_neox',); "
        "print([m for m in ('numpy', 'jax', 'mlxcel_family_example.gpt_neox') if m in sys.modules])"
    )
    assert run(python, "-c", probe, cwd=tmp_path).stdout.strip() == "[]"


def test_its_own_tests_pass_where_it_is_installed(python: Path) -> None:
    # -P: the source folder must not hide what is installed.
    own = (
        python,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-W",
        "error",
        "--rootdir",
        ".",
        "tests",
    )
    assert " passed" in run(*own, cwd=python.parents[2] / "source").stdout


def test_without_the_distribution_the_architecture_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    done = run(environment(tmp_path / "env"), *GENERATE, "-p", "x", model, cwd=tmp_path, ok=False)
    assert done.returncode == 3
    assert done.stdout == ""
    for words in ("model_type 'gpt_neox'", "llama", "qwen3", "a plugin adds one with the hook mlxcel_families"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
