"""A backend whose model repeats its prompt, special tokens left out: what it was fed can be read in what it says. While
the prompt holds "slow" a token takes a while, from the hundredth on so long that a reply never gets to its end. For the
model `tiny`, whose ids below 256 are bytes."""

PLUGIN = """
import time

from mlxcel.core.backend import BackendSpec, Probe
from mlxcel.plugins.hookspecs import hookimpl

def probe(device):
    return Probe(available=True, reason="a script")

def backend(*, device, dtype, deterministic):
    from mlxcel.testing.scripted import ScriptedBackend

    class Echo(ScriptedBackend):
        slow, steps = False, 0

        def submit(self, plan):
            if self.slow:
                self.steps += 1
                time.sleep(0.02 if self.steps < 100 else 1.0)
            return super().submit(plan)

    def script(spec):
        text = bytes(token for token in spec.prompt_ids.tolist() if token < 256)
        echo.slow, echo.steps = b"slow" in text, 0
        end = min(spec.eos_ids)
        return [*text, end, end]  # one step may be ahead

    echo = Echo(script)
    return echo

@hookimpl
def mlxcel_backends():
    return [BackendSpec("echo", "repeats", f"{__name__}:backend", priority=-1, probe_target=f"{__name__}:probe")]
"""
