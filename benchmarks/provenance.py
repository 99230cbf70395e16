"""What every record says about where it comes from: machine, load, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    return {
        "machine": machine(),
        "load_average": os.getloadavg(),  # of the last minute, 5 and 15: what else ran beside it
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "commit": commit(),
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """The processor's own name where the system tells it, and how many of its cores this process may use."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
