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


@pytest.mark.variant
def test_kernels_compile_for_a_gpu_and_keep_registers_out_of_memory():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "helpers.compiled_kernels"]
    out = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1800)
    assert out.returncode == 0, out.stderr[-2000:]
    compiled = json.loads(out.stdout)  # what each program launches, or the message with which it does not compile
    assert len(compiled) > 20
    for name, launched in compiled.items():
        assert launched, name
        assert isinstance(launched, list), (name, launched)
        assert all(stack <= MOST_STACK and shared <= MOST_SHARED for _, stack, shared in launched), (name, launched)
