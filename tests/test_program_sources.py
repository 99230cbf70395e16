"""The sources that a compiled program comes from: every byte counts, and what nobody can read is not known."""

import importlib
import math
import shutil
import sys
import time
import types
import zipfile

import pytest

from mlxcel_jax_cuda import sources
from mlxcel_jax_cuda.package_files import Unknown
from mlxcel_jax_cuda.sources import Sources, foreign_digest


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("a.py", "A = 1\n"), ("inner/b.py", "B = 1\n")):
        (package / name).write_text(text)
    return package


def digest_of(folder, began=math.inf):
    return Sources.read([(folder, path) for path in sorted(folder.rglob("*.py"))], began).digest


def test_a_byte_of_a_source_that_changes_is_another_program(folder):
    first = digest_of(folder)
    assert digest_of(folder) == first
    found = {first}
    for change in (
        lambda: (folder / "inner/b.py").write_text("B = 2\n"),
        lambda: (folder / "a.py").rename(folder / "c.py"),
        lambda: (folder / "c.py").rename(folder / "inner/c.py"),
        lambda: (folder / "d.py").write_text(""),
        lambda: (folder / "d.py").unlink() or (folder / "__init__.py").write_text("\n"),
    ):
        change()
        found.add(digest_of(folder))
    assert len(found) == 6


def test_sources_that_were_written_since_the_process_began_are_not_known(folder):
    began = max(path.stat().st_ctime for path in folder.rglob("*.py")) + 0.001
    read = Sources.read([(folder, folder / "a.py")], began)
    assert read.unchanged()
    (folder / "new.py").write_text("A = 2\n")
    time.sleep(0.05)  # longer than the steps of a file system's clock
    (folder / "new.py").replace(folder / "a.py")
    assert not read.unchanged()
    with pytest.raises(Unknown, match="since this process began"):
        digest_of(folder, began)


def test_other_files_in_the_place_of_those_that_were_read_are_noticed(folder):
    """Whatever the clock says: a folder that was moved there, or a link that leads elsewhere."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    link = folder.with_name("link")
    link.symlink_to(folder)
    direct, linked = (Sources.read([(each, each / file) for file in files], math.inf) for each in (folder, link))
    assert direct.unchanged()
    assert linked.unchanged()
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    link.unlink()
    link.symlink_to(other)
    assert direct.unchanged()
    assert not linked.unchanged()
    folder.rename(folder.with_name("old"))
    other.rename(folder)
    assert not direct.unchanged()


def test_what_a_linked_file_leads_to_counts(folder):
    link = folder / "link.py"
    link.symlink_to("a.py")
    read = Sources.read([(folder, link)], math.inf)
    assert read.unchanged()
    (folder / "a.py").write_text("A = 22\n")  # of another size: the clock of a file system has its steps
    assert not read.unchanged()


def test_a_link_that_was_made_since_the_process_began_is_not_known(folder):
    began = max(path.stat().st_ctime for path in folder.rglob("*.py")) + 0.001
    time.sleep(0.05)
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert Sources.read([(folder, folder / "a.py")], began).unchanged()
    with pytest.raises(Unknown, match="since this process began"):
        Sources.read([(link, link / "a.py")], began)


def test_the_process_began_a_while_ago():
    """Behind the files that it has read, before the ones that this test writes."""
    assert 0 < time.time() - sources.process_start() < 24 * 3600


@pytest.fixture
def fresh(monkeypatch):
    """Nothing was read yet, and everything in the world is old."""
    sources._read.cache_clear()
    monkeypatch.setattr(sources, "process_start", lambda: math.inf)
    yield
    sources._read.cache_clear()


def test_a_third_partys_digest_is_of_all_that_it_imports(third_party, fresh, tmp_path):
    site = tmp_path / "site"
    files = {
        "parrot_family/__init__.py": "import jax, numpy\nfrom mlxcel.core.kv import KVSpec\nfrom . import forward\n",
        "parrot_family/forward.py": "def run():\n    import parrot_words\n    from absent_words import more\n",
        "parrot_family/table.json": "[1]",
        "parrot_words.py": "from parrot_deep.inner import WORD\n",
        "parrot_deep/inner.py": "WORD = 1\n",
        "unrelated.py": "",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)

    def digest():
        sources._read.cache_clear()
        return foreign_digest("parrot_family")

    first = digest()
    assert digest() == first
    (site / "unrelated.py").write_text("1")
    assert digest() == first
    found = {first}
    for name in list(files)[:-1]:
        (site / name).write_text(files[name] + " ")
        found.add(digest())
    (site / "absent_words.py").write_text("more = 1\n")
    found.add(digest())
    assert len(found) == len(files) + 1


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module('x')\n",
        "from importlib import import_module as take\ntake('x')\n",
        "from importlib import util\nutil.spec_from_file_location('x', 'x.py').loader.exec_module(1)\n",
        "from importlib.metadata import entry_points\n",
        "import os\nFAST = os.environ.get('FAST')\n",
        "from os import getenv\n",
        "exec('1')\n",
        "eval('1')\n",
        "def f(:\n",
        "\0",
        "#" * (3 << 20),
    ],
    ids=lambda text: text[:40],
)
def test_a_third_party_that_hides_what_it_runs_is_not_known(third_party, fresh, tmp_path, text):
    (tmp_path / "site/hiding_family.py").write_text(text)
    with pytest.raises(Unknown, match="hiding_family"):
        foreign_digest("hiding_family")


def test_a_file_that_cannot_be_read_as_code_is_not_known(third_party, fresh, tmp_path):
    """Its imports are not told."""
    package = tmp_path / "site/built_family"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    with pytest.raises(Unknown, match=r"inner.*\.so"):
        foreign_digest("built_family")


def test_a_folder_elsewhere_that_a_package_links_to_is_not_known(third_party, fresh, tmp_path):
    for name in ("site/linked_family", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "site/linked_family/inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unknown, match="inner is a link"):
        foreign_digest("linked_family")


@pytest.mark.parametrize("imported", [True, False])
def test_what_lies_in_an_archive_is_not_known(third_party, fresh, tmp_path, monkeypatch, request, imported):
    archive = tmp_path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("packed_family/__init__.py", "")
    monkeypatch.syspath_prepend(str(archive))
    if imported:
        request.addfinalizer(lambda: sys.modules.pop("packed_family"))
        importlib.import_module("packed_family")
    (tmp_path / "site/user_of_it.py").write_text("import packed_family\n")
    with pytest.raises(Unknown, match=r"packed\.zip"):
        foreign_digest("user_of_it")


def test_a_package_that_is_nowhere_is_not_known(fresh):
    """As of a file that somebody loaded by its path."""
    with pytest.raises(Unknown, match="nowhere_family is in no file"):
        foreign_digest("nowhere_family")


def test_a_script_that_is_a_part_of_a_package_is_not_known(fresh, tmp_path, monkeypatch):
    """Its neighbours are imported by another name than its own."""
    script = types.ModuleType("__main__")
    script.__file__, script.__package__ = str(tmp_path / "script.py"), "package"
    (tmp_path / "script.py").write_text("from .beside import more\n")
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(Unknown, match="part of package"):
        foreign_digest("__main__")
    sources._read.cache_clear()
    script.__package__ = None
    assert foreign_digest("__main__")


def test_what_is_not_known_is_looked_for_once(third_party, fresh, tmp_path):
    file = tmp_path / "site/hasty_family.py"
    file.write_text("exec('1')\n")
    for _ in range(2):
        with pytest.raises(Unknown, match="exec"):
            foreign_digest("hasty_family")
        file.unlink(missing_ok=True)


def test_a_module_in_no_file_of_its_package_is_not_known(third_party, fresh, tmp_path, monkeypatch):
    """As of a package that was replaced, or that somebody adds to while it runs."""
    (tmp_path / "site/whole_family.py").write_text("")
    added = types.ModuleType("whole_family.more")
    added.__file__ = str(tmp_path / "elsewhere.py")
    monkeypatch.setitem(sys.modules, "whole_family.more", added)
    with pytest.raises(Unknown, match="belongs to no folder"):
        foreign_digest("whole_family")
