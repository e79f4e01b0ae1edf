"""What the README and the notebook show runs as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(program: str, folder: Path) -> str:
    """Run a program in an empty folder. Returns what it printed."""
    file = folder / "program.py"
    file.write_text(program)
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, file], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/quickstart.md", marks=pytest.mark.slow)])
def test_the_first_python_block_of_a_page_runs_as_it_stands(page, tmp_path):
    assert run(python_blocks(page)[0], tmp_path).strip()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples" / "train_a_drafter.ipynb").read_text())["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "tokens per step" in run(program, tmp_path)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 125
