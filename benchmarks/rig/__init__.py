"""The parts that the benchmarks share: a process pair, timed blocks, C levels, facts about the machine, and tables."""

import os
from importlib.util import find_spec

for module in ("hixl_async", "numpy"):
    if find_spec(module) is None:
        raise SystemExit(f"the benchmarks need {module}: pip install '.[bench]', in the folder above this one")

# Wherever numpy is imported, children included, its threads for linear algebra spin for a while; nothing here uses them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
