"""Every example runs as a reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {
    "own_model.py": "tokens per step",
    "draft_target.py": "the same tokens",
    "chat.py": "> And of `grep`?",
    "streaming.py": "[",
    "custom_generate.py": "committee",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_example_runs(script, tmp_path):
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert SCRIPTS[script] in found.stdout


def test_no_example_is_left_out():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SCRIPTS)
