"""What the benchmarks share: a process pair, timed blocks, C rungs, facts about the machine, and a table."""
