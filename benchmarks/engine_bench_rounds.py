"""Interleaved rounds of `mlxcel bench-engine`, or of any program that prints such lines, so that the slow drift of a
host does not look like an effect.

    python benchmarks/engine_bench_rounds.py --arm small="--prefill-chunk 512" --arm large="--prefill-chunk 2048" \\
        --model M --out rounds.jsonl

Each arm is a process of its own in each round; round r begins with arm r. A null arm runs the flags of the first arm
(--null-every-arm: of each) as a process of its own: how far it is from its source is what no difference looks like.
Before each process the host has to be quiet, for which it waits --gate-timeout seconds at most.

Records go to --out as each process ends, the summary to stdout. Exit codes: 0; 1 for a loss over its threshold under
--compare; 2 for what is refused; 3 where a process failed; 128 and the signal's number (130 for Ctrl-C) where it was
interrupted, which leaves no process behind. Needs nothing but Python.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rounds.comparison import check_place, check_plan, compare
from rounds.gate import Gate
from rounds.host import Watch, take_sample
from rounds.options import Options, parse
from rounds.processes import VISIBLE
from rounds.records import Lost, Refused, of_kind, read_records
from rounds.run import FAILED, Interrupted, Run, say
from rounds.summary import summarise
from rounds.tables import summary_lines

REFUSED = 2


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv, __doc__ or "")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _summarised(options) if options.summarise is not None else _run(options)
    except Refused as error:
        say(f"error: {error}")
        return REFUSED
    except Lost as error:
        say(f"error: {error}")
        return FAILED
    except Interrupted as stop:
        say("interrupted")
        return 128 + stop.number
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it when it ends
        say(f"error: stdout cannot be written: {error}")
        return FAILED


def _run(options: Options) -> int:
    watch = Watch(options.gate_load, options.gate_busy, os.environ.get(VISIBLE), take_sample)
    gate = Gate(watch, options.gate_timeout) if options.gate else None
    facts = {
        "on": options.gate, "strict": options.gate_strict, "timeout_s": options.gate_timeout,
        "load_per_core": options.gate_load, "busy": list(options.gate_busy),
        **(watch.reads() if options.gate else {}),
    }  # fmt: skip
    return Run(options, gate, facts, os.environ)()


def _summarised(options: Options) -> int:
    assert options.summarise is not None
    records = read_records(options.summarise)
    print(*summary_lines(summarise(records)), sep="\n", flush=True)
    if options.compare is None:
        return 0
    base, header = read_records(options.compare), of_kind(records, "header")[0]
    check_plan(base, header)
    check_place(of_kind(base, "header")[0], header)
    return compare(base, records)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main())
