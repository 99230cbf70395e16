"""What the command line costs to start: `mlxcel --help` against a bare interpreter, and the first token of a demo run.

Rounds are interleaved, so that a busy moment meets both sides; medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def seconds(arguments: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(arguments, check=True, capture_output=True)
    return time.perf_counter() - begun


def first_token() -> tuple[float, dict[str, float]]:
    """Seconds from the start of the process until a reply of one token was out, and the program's own figures."""
    arguments = ["generate", "-p", "Why is the sky blue?", "-n", "1", "--json", "-q"]
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "mlxcel", *arguments], check=True, capture_output=True)
    return time.perf_counter() - begun, json.loads(done.stdout)["timings"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    bare: list[float] = []
    helps: list[float] = []
    for _ in range(rounds):
        bare.append(seconds([sys.executable, "-c", "pass"]))
        helps.append(seconds([sys.executable, "-m", "mlxcel", "--help"]))
    ratio = statistics.median(helps) / statistics.median(bare)
    print(f"python -c pass  {statistics.median(bare) * 1000:6.0f} ms")
    print(f"mlxcel --help   {statistics.median(helps) * 1000:6.0f} ms  {ratio:.1f} times a bare interpreter")
    first_token()  # fetches the model where it is not in the store yet
    runs = [first_token() for _ in range(rounds)]
    print(f"first token     {statistics.median(total for total, _ in runs):6.2f} s from the start of the process")
    for name in ("load_ms", "ttft_ms"):
        print(f"  {name:13} {statistics.median(figures[name] for _, figures in runs):6.0f}")


if __name__ == "__main__":
    main()
