"""What the benchmarks share: a process pair, timed blocks, C rungs, facts about the machine, and a table."""

import os

# numpy's threads for linear algebra spin for a while wherever it is imported, children included; nothing here needs them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
