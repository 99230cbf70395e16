"""The first moments of the program."""

import subprocess
import sys

import pytest

INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "mlxcel.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
        return None

{before}
sys.meta_path.insert(0, Interrupting())
sys.argv = ["mlxcel", "--version"]
from mlxcel.cli.start import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("before", "code"), [("", 130), ("signal.signal(signal.SIGINT, signal.SIG_IGN)", 0)], ids=["asked", "nohup"]
)
def test_h_s1_an_interrupt_during_the_first_imports_leaves_no_trace(before, code):
    """docs/spec/clients.md 1.4; a parent that ignores interrupts is obeyed."""
    program = INTERRUPTED_IMPORT.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")
    assert ("mlxcel" in done.stdout) is (code == 0)
