"""Triton kernels compile for a GPU, also where there is none: the interpreter takes what the compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
MOST_SHARED = 227 << 10  # bytes of shared memory that a program may have on a Hopper GPU
MOST_STACK = 256  # bytes of registers in memory that cost less than a smaller tile would
NAMES = [
    "attention of one node",
    "attention of a tree",
    "attention of many trees",
    "attention of chains within a window",
    "attention of a tree over an FP8 cache",
    "attention of one node over an FP8 cache",
    "attention of one node and one head over a long FP8 cache",
    "attention beside chunks",
    "attention of float32 heads of 128",
    "attention of float32 heads of 256",
    "attention of heads of 256",
    "attention of heads of 512",
    "attention of one node and a head of 512",
    "attention in order",
    "attention in order over an FP8 cache",
    "search with 5 beams",
    "search with 32 beams",
    "search with 48 beams",
    "search with 64 beams",
    "product of few tokens",
    "FP8 product of few tokens",
    "FP8 product of many tokens",
    "rounding to FP8",
    "rounding to numbers of FP8",
]


@pytest.fixture(scope="module")
def compiled():
    """Return what each program launches, or the message with which it does not compile."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "helpers.compiled_kernels"]
    out = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1800)
    assert out.returncode == 0, out.stderr[-2000:]
    return json.loads(out.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_for_a_gpu(compiled, name):
    assert isinstance(compiled[name], list), compiled[name]
    assert compiled[name]
    assert all(stack <= MOST_STACK and shared <= MOST_SHARED for _, stack, shared in compiled[name]), compiled[name]


def test_all_programs_are_named_here(compiled):
    assert list(compiled) == NAMES
