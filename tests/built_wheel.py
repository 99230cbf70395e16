"""The wheel, built from a copy of the tree, and an environment that has it and its base requirements alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import attrs
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "mlxcel": ROOT / "mlxcel",
    "mlxcel_jax_cuda": ROOT / "backends" / "jax_cuda",
    "mlxcel_reference_numpy": ROOT / "backends" / "reference_numpy",
}


def copy_sources(folder: Path) -> Path:
    """What a build reads, without anything that was made from it."""
    made = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("mlxcel", "backends"):
        shutil.copytree(ROOT / name, folder / name, ignore=made)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    (folder / ".gitignore").write_text("*.egg-info/\nbuild/\ndist/\n")
    return folder


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A program without variables of ours or of Python's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLXCEL", "PYTHON", "GIT_"))}
    environment = {**kept, "XDG_CACHE_HOME": str(cwd / "cache"), "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(list(command), cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def commit(folder: Path) -> str:
    """Make the folder a git checkout with everything committed; its commit, 12 digits."""
    run("git", "init", "-q", cwd=folder)
    run("git", "add", ".", cwd=folder)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    run("git", *author, "commit", "-q", "-m", "all", cwd=folder)
    return run("git", "rev-parse", "--short=12", "HEAD", cwd=folder).stdout.strip()


def build(source: Path, out: Path, *options: str) -> list[Path]:
    """What `python -m build` makes of a folder, without the network."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, source, cwd=source)
    return sorted(out.iterdir())


@attrs.frozen
class Environment:
    """A virtual environment without pip, in `folder`."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @classmethod
    def with_wheel(cls, folder: Path, wheel: Path) -> Environment:
        """Nothing in it but the wheel, and links to what its base requirements need, as they are installed here."""
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        made = cls(folder / "venv")
        pip = (sys.executable, "-m", "pip", "--python", made.python, "--disable-pip-version-check")
        run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=folder)
        [installed] = metadata.distributions(name="mlxcel", path=[str(made.site)])
        for distribution in closure(installed):
            for name in {
                path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")
            }:
                if not (made.site / name).exists():
                    (made.site / name).symlink_to(Path(str(distribution.locate_file(name))))
        return made

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Its Python, away from the source tree."""
        return run(self.python, *arguments, cwd=self.folder, check=check)

    def mlxcel(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Its `mlxcel` program."""
        return run(self.folder / "bin" / "mlxcel", *arguments, cwd=self.folder, check=check)


def closure(distribution: metadata.Distribution) -> list[metadata.Distribution]:
    """All that a distribution requires without extras, and what those require."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [distribution]
    while waiting:
        for text in waiting.pop().requires or ():
            requirement = Requirement(text)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                found[requirement.name] = metadata.distribution(requirement.name)
                waiting.append(found[requirement.name])
    return list(found.values())
