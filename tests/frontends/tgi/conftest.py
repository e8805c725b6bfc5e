"""The comparison rules of tests/support, for this folder too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
