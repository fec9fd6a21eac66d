"""How often the cause of a loop is named; `python -m benchmarks.repetitions`."""
