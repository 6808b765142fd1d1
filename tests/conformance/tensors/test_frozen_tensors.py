"""States, payloads and steps frozen by hash: a change here is a new version of the format.

That they do not depend on threads and vector widths is tested through ``cases.py``.

``python tests/conformance/tensors/test_frozen_tensors.py`` writes the hashes anew; running it is
approving the change.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from tensor_cases import CASES  # noqa: E402

FROZEN = HERE / "frozen.json"


def found(name: str) -> str:
    return hashlib.sha256(CASES[name]()).hexdigest()


def test_every_case_is_frozen() -> None:
    assert json.loads(FROZEN.read_text()).keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_that_were_approved(name: str) -> None:
    assert found(name) == json.loads(FROZEN.read_text())[name]


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({name: found(name) for name in CASES}, indent=1) + "\n")
