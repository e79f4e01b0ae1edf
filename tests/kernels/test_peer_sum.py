"""Sums that GPUs send to each other in one launch: processes stand for GPUs, and share memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]


@pytest.mark.variant
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_equal_those_in_the_order_of_ranks(ranks):
    words = [sys.executable, "-m", "helpers.sent_sums", str(ranks)]
    env = os.environ | {"TRITON_INTERPRET": "1"}  # on a machine with a GPU too
    out = subprocess.run(words, cwd=TESTS, env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
