"""What the benchmarks share: a process pair, timed blocks, C rungs, facts about the machine, and a table."""

import os
from importlib.util import find_spec

for module in ("hixl_async", "numpy"):
    if find_spec(module) is None:
        raise SystemExit(f"the benchmarks need {module}: pip install '.[bench]', in the folder above this one")

# numpy's threads for linear algebra spin for a while wherever it is imported, children included; nothing here needs them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
