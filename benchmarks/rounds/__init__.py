"""The parts of engine_bench_rounds.py: arms, schedule, gate, process, records, summary, comparison."""
