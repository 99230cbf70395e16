"""How fast GGUF tensors become float32: every type that is read, on one core, beside a plain copy of as many float32.

    python benchmarks/dequantise.py [--millions 16] [--rounds 7] [--json FILE]

All types and the copy take turns in each round, so that a busy machine slows all of them. The work is one thread, so
its processor time tells what it costs while others use the machine too; the clock on the wall is recorded beside it.
Input and output have been touched before: neither the disk nor the first use of memory is in the figures. Blocks hold
random bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

from mlxcel.plugins.formats.gguf_blocks import READABLE_TYPES

GOAL = 300  # million values a second of processor time, of every type


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """(processor, wall)"""
    processor, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - processor, time.perf_counter() - wall


def measure(values: int, rounds: int) -> dict[str, Any]:
    source, out = np.ones(values, np.float32), np.zeros(values, np.float32)
    contenders: dict[str, Callable[[], None]] = {"copy": lambda: np.copyto(out, source)}
    for name, block in READABLE_TYPES.items():
        raw = np.random.default_rng(1).integers(0, 256, values // block.elements * block.nbytes, np.uint8)
        contenders[name] = partial(block.dequantise, raw, out)
    before = provenance()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for name, work in [*contenders.items()] * (1 + rounds):
        times[name].append(seconds(work))
    processor, wall = (  # without the first round, which touches the memory
        {name: [values / spent[clock] / 1e6 for spent in runs[1:]] for name, runs in times.items()} for clock in (0, 1)
    )
    copies = processor["copy"]
    return {
        **before,
        "values": values,
        "rounds": rounds,
        "million_values_per_processor_second": processor,
        "million_values_per_wall_second": wall,
        "share_of_copy": {
            name: statistics.median(mine / copy for mine, copy in zip(rates, copies, strict=True))
            for name, rates in processor.items()
        },
    }


def show(record: dict[str, Any]) -> None:
    print(f"{record['machine']}  numpy {record['numpy']}  commit {record['commit']}")
    load, millions = record["load_average"][0], record["values"] / 1e6
    print(f"load {load:.1f} before, {record['rounds']} rounds of {millions:.0f} M values; million values a second")
    for name, rates in record["million_values_per_processor_second"].items():
        middle, wall = statistics.median(rates), statistics.median(record["million_values_per_wall_second"][name])
        spread = f"{min(rates):.0f} … {max(rates):.0f}"
        print(f"{name:7} {middle:6.0f} of processor time ({spread:12}) {wall:6.0f} on the wall", end="")
        if name == "copy":
            print()
        else:
            verdict = "met" if middle >= GOAL else "MISSED"
            print(f"  {record['share_of_copy'][name]:4.0%} of copy  goal {GOAL}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=16, help="values of each type, in units of 2**20")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = measure(options.millions << 20, options.rounds)
    show(record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
