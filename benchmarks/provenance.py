"""What every record says about where it comes from: machine, load, versions, commit."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

from mlxcel.tools.machine import machine, source


def provenance() -> dict[str, Any]:
    return {
        "machine": machine(),
        "load_average": os.getloadavg(),  # of the last minute, 5 and 15: what else ran beside it
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "commit": source().commit,
    }
