"""A model that says what its prompt says, byte by byte, and fails at a "!": replies that tests choose, end to end."""

from pathlib import Path

from plugin_doubles import HEADER, Installer
from tiny_checkpoint import write_tiny_llama

from mlxcel.testing.byte_tokenizer import ByteTokenizer

PLUGIN = (
    HEADER
    + """
from mlxcel.core.backend import Probe

def probe(device):
    return Probe(available=True, reason="a script")

def backend(*, device, dtype, deterministic):
    from mlxcel.testing.byte_tokenizer import EOS
    from mlxcel.testing.scripted import ScriptedBackend

    return ScriptedBackend(lambda spec: [*spec.prompt_ids.tolist(), EOS, EOS])  # one step may be ahead

class Tripwire:
    def open(self, spec):
        return None

    def check(self, state, output, text):
        if output[-1] == ord("!"):
            raise ValueError("tripped")

@hookimpl
def mlxcel_backends():
    return [BackendSpec("script", "echo", f"{__name__}:backend", priority=-1, probe_target=f"{__name__}:probe")]

@hookimpl
def mlxcel_finish_steps():
    return [Named("tripwire", "fails", f"{__name__}:Tripwire")]
"""
)


def script_options(third_party: Installer, folder: Path) -> dict[str, object]:
    """Arguments of LLM and AsyncLLM for such a model."""
    third_party.install("script", PLUGIN)
    return {"model": write_tiny_llama(folder / "model"), "backend": "script", "tokenizer": ByteTokenizer()}
