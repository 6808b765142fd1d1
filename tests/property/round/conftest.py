"""Lets the tests of this folder import ``round_world`` and this folder's own oracle."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "unit" / "round")]
