"""Only what pyproject.toml cannot say: packages.find does not rename, the backends live outside mlxcel/, and a build
stamps the commit it was made from into mlxcel/_build.py, in what it builds and never in the source tree."""

import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent


def renamed(folder: str, name: str) -> list[str]:
    return [name, *(f"{name}.{package}" for package in find_packages(folder))]


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """The commit of this very folder, "+changes" behind it when files differ from it; None outside a git checkout."""
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != HERE:  # an unpacked sdist inside someone else's repository
        return None
    changes = git("status", "--porcelain", "--untracked-files=no")
    return f"{git('rev-parse', '--short=12', 'HEAD') or 'unknown'}{'+changes' if changes else ''}"


def stamp(folder: Path) -> None:
    """Without a checkout an sdist's own stamp, copied along with the package, stays as it is."""
    if (known := commit()) is not None:
        path = folder / "mlxcel" / "_build.py"
        path.unlink(missing_ok=True)
        path.write_text(f'"""Written by the build."""\n\nCOMMIT = "{known}"\n')


class StampedBuild(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            stamp(Path(self.build_lib))


class StampedSdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        stamp(Path(base_dir))


setup(
    packages=[
        *find_packages(include=["mlxcel", "mlxcel.*"]),
        *renamed("backends/jax_cuda", "mlxcel_jax_cuda"),
        *renamed("backends/reference_numpy", "mlxcel_reference_numpy"),
    ],
    cmdclass={"build_py": StampedBuild, "sdist": StampedSdist},
)
