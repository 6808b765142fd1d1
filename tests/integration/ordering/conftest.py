"""Lets the tests of this folder import ``comet_swarm``, and ``node_swarm`` of the unit tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "unit" / "node")]
