"""Makes the examples importable: the modules of the disaggregated one, and the package of the scheduler."""

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "disaggregated"), str(EXAMPLES)]

# Read when numpy is first imported. With more threads BLAS need not add in the same order twice.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
