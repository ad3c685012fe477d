"""Makes the modules of the disaggregated example importable: it is a demo to run, not a package."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "disaggregated"))

# Read when numpy is first imported. With more threads BLAS need not add in the same order twice.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
