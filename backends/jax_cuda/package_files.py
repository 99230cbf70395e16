"""The files of a package, and what they import, found without running any of them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_HIDDEN: Final = {
    "import_module", "__import__", "spec_from_file_location", "exec_module", "load_module", "entry_points",
    "exec", "run_path", "run_module", "environ", "environb", "getenv",
}  # fmt: skip
"""Names by which code is run that nobody finds by reading, or becomes another by a variable."""

_BUILT: Final = (".so", ".pyd", ".pyc")
"""What imports something and does not say what."""


class Unknown(Exception):
    """Why it cannot be told what code comes from."""


def files_of(name: str, ending: str) -> Iterator[tuple[Path, Path]]:
    """(folder, file) of a package or a module, of files that end so; none of what is not there."""
    module = sys.modules.get(name)
    try:
        spec = None if module is not None else find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if module is None and spec is None:
        return
    folders = getattr(module, "__path__", None) if spec is None else spec.submodule_search_locations
    if folders is not None:
        for folder in map(Path, folders):
            yield from ((folder, path) for path in _below(folder) if path.name.endswith(ending))
        return
    file = getattr(module, "__file__", None) if spec is None else spec.origin
    if file is None:
        raise Unknown(f"{name} is in no file")
    if package := getattr(module, "__package__", None):
        raise Unknown(f"{name} is a part of {package}")  # by another name, as a script is
    if not Path(file).is_file():
        raise Unknown(f"{file} is no file")
    yield Path(file).parent, Path(file)


def _below(root: Path) -> Iterator[Path]:
    """Files in order. Unknown where some cannot be found."""
    if not root.is_dir():
        raise Unknown(f"{root} is no folder")
    for folder, inner, names in os.walk(root):
        inner[:] = sorted({*inner} - {"__pycache__"})
        for each in inner:
            if Path(folder, each).is_symlink():
                raise Unknown(f"{Path(folder, each)} is a link")
        yield from (Path(folder, each) for each in sorted(names) if Path(folder, each).is_file())


def imports_of(path: Path) -> Iterator[str]:
    """Top-level names that a file imports, wherever in it."""
    if path.suffix in _BUILT:
        raise Unknown(f"{path} does not say what it imports")
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unknown(f"{path} cannot be read: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
        # A name, an attribute, and what is imported.
        named = [getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)]
        if hidden := _HIDDEN.intersection(each for each in named if isinstance(each, str)):
            raise Unknown(f"{path} goes by {min(hidden)}")
        if isinstance(node, ast.Name) and node.id == "eval":
            raise Unknown(f"{path} goes by eval")
