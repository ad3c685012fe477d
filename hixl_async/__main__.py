"""``python -m hixl_async``: the same as the command ``hixl-async``."""

import sys

from .cli import main

sys.exit(main())
