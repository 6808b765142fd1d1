"""Network partitions: two halves finalize nothing, three of four go on, and all find together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from comet_swarm import SECONDS, needs_cometbft

STORY = Path(__file__).with_name("partition_story.py")
CUT_SECONDS = 4.0


def no_namespaces() -> str:
    """Why there can be none here; empty if there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "add", "x", "type", "bridge"],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.decode()}"


pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("swarms"),
    needs_cometbft,
    pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces()),
]


def test_halves_finalize_nothing_three_go_on_and_all_find_together(tmp_path: Path) -> None:
    command = ["unshare", "--net", "--mount", sys.executable, str(STORY)]
    ran = subprocess.run(
        [*command, str(tmp_path), str(CUT_SECONDS)],
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["finalized_in_two_halves"] == [0, 0, 0, 0]
    assert found["blocks_of_three"] >= 4
    if found["blocks_under_loss"] is None:
        warnings.warn("this kernel has no netem: nothing was lost", stacklevel=1)
    else:
        assert found["blocks_under_loss"] >= 4
    assert found["heal_seconds"] < SECONDS
    assert found["return_seconds"] < SECONDS
